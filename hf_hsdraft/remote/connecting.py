"""`connect`, importable without the packages that a connection needs."""

from __future__ import annotations

import ssl
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..core.checks import demand, is_number

if TYPE_CHECKING:
    from .remote_model import RemoteModel

NEEDED = ("msgpack", "websockets")


def check_packages() -> None:
    """Raises an ImportError with the install command if a package for connections is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"connections need {' and '.join(missing)}: pip install -e '.[remote]' in a checkout")


def connect(
    url: str,
    token: str = "",
    *,
    tls: ssl.SSLContext | None = None,
    patience: float = 60.0,
    timeout: float = 60.0,
) -> RemoteModel:
    """Connects to a server that verifies drafts made here, see `hsdraft remote serve`.

    Args:
        url: `https://host:port`, or `http://` on this machine or where no token is needed.
        token: bearer token.
        tls: context with other trusted certificates, or with client certificates.
        patience: seconds to retry a lost connection or an overloaded server; 0 raises at once. An unreachable server is
            not retried on the first connection.
        timeout: seconds to wait for an answer.

    Raises:
        ImportError: a package is missing.
        LinkLost: there is no connection.
        ServerRefused: the server refuses the connection.
        ValueError: the address is invalid, or `patience` or `timeout` is.
    """
    check_packages()
    demand(is_number(patience) and patience >= 0, "patience", patience, "expected seconds, a number 0 or more")
    demand(is_number(timeout) and timeout > 0, "timeout", timeout, "expected seconds, a number above 0")
    from .link import Address
    from .remote_model import RemoteModel

    return RemoteModel(Address.of(url, token, tls), patience, timeout)
