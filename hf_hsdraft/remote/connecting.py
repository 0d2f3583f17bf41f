"""The way to a model elsewhere, without what a connection needs until there is one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

NEEDED = ("msgpack", "websockets")


def check_packages() -> None:
    """Raises an ImportError that says what to install, if a package of connections is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"connections need {' and '.join(missing)}: pip install 'hf-hsdraft[remote]'")


def connect(url: str, token: str = "", **options: Any) -> Any:
    """Connects to a server that verifies drafts made here, see `hsdraft verify-server`.

    Args:
        url: `https://host:port`, or `http://` on this machine or where no token is needed.
        token: bearer token that the server wants.
        options: see `remote_model.connect`.

    Returns:
        a [`RemoteModel`]: its `generate(prompt, assistant_model=drafter)` drafts here and has drafts verified there.

    Raises:
        ImportError: a package is missing.
        LinkLost: there is no connection.
        ServerRefused: the server does not take it.
        ValueError: the address is none.
    """
    check_packages()
    from .remote_model import connect as connected

    return connected(url, token, **options)
