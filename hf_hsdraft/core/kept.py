"""What is known of objects, such as targets, for as long as they live. Nothing is set on the objects themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")

_records: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def kept_with(owner: Any, name: str, made: Callable[[], Record]) -> Record:
    """Returns the record of that name of an object, which is made when it is first asked for."""
    records = _records.setdefault(owner, {})
    return records[name] if name in records else records.setdefault(name, made())
