"""Records of objects, such as targets, kept for as long as these live, without setting anything on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")

_records: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def kept_with(owner: Any, name: str, made: Callable[[], Record]) -> Record:
    """Returns an object's record of that name, made on first use. Threads that ask at once get the same one."""
    records = _records.setdefault(owner, {})
    return records[name] if name in records else records.setdefault(name, made())
