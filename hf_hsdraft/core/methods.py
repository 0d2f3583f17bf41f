"""Optional methods, found by what they offer. Only this file imports from `methods/`.

`methods/index.json` maps what is offered to modules of `methods/`:

    {"verification": {"fly": "lossy.relaxed"}, "model_type": {"cascade": "cascade.cascade_drafter"}}

A module registers its offers when imported, and is imported when one of its names is looked up. Without the folder
nothing is offered, and everything else works.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, MutableMapping
from functools import cache
from importlib import resources
from types import ModuleType
from typing import TypeVar

Offer = TypeVar("Offer")

_PACKAGE = f"{__package__.partition('.')[0]}.methods"


@cache
def _index() -> dict[str, dict[str, str]]:
    try:
        return json.loads(resources.files(_PACKAGE).joinpath("index.json").read_text(encoding="utf-8"))
    except (ModuleNotFoundError, FileNotFoundError):
        return {}


def offered(kind: str) -> list[str]:
    """Returns the names that methods offer of a kind, such as `"verification"`, without importing them."""
    return list(_index().get(kind, {}))


def load(kind: str, name: str) -> ModuleType:
    """Imports the module that offers a name. Raises an ImportError if no method does."""
    if name not in offered(kind):
        raise ImportError(f"{name!r} ({kind}) belongs to a method, and {_PACKAGE} is not here or has none of that name")
    return importlib.import_module(f"{_PACKAGE}.{_index()[kind][name]}")


class Registry(MutableMapping[str, Offer]):
    """Entries of the `core`, and of methods (the table `kind` in `index.json`), which load on first lookup."""

    def __init__(self, kind: str, core: dict[str, Offer] | None = None) -> None:
        self.kind, self.loaded = kind, dict(core or {})

    def __getitem__(self, name: str) -> Offer:
        if name not in self.loaded and name in offered(self.kind):
            load(self.kind, name)
        return self.loaded[name]

    def __setitem__(self, name: str, offer: Offer) -> None:
        self.loaded[name] = offer

    def __delitem__(self, name: str) -> None:
        del self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.loaded or name in offered(self.kind)

    def __iter__(self) -> Iterator[str]:
        methods = offered(self.kind)
        yield from [*(name for name in list(self.loaded) if name not in methods), *methods]

    def __len__(self) -> int:
        return len(list(iter(self)))
