"""Locks that are free in a forked child: the threads that hold them are not in it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def freed_in_children(lock: Any) -> Any:
    """Returns the lock, which the child of a fork finds free, as Python does with the locks of its library."""
    _locks.add(lock)
    return lock


def new_lock() -> Any:
    """A `threading.Lock` that is free in a forked child."""
    return freed_in_children(threading.Lock())


def new_rlock() -> Any:
    """A `threading.RLock` that is free in a forked child."""
    return freed_in_children(threading.RLock())


def _free() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
