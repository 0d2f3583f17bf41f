"""State that the user's modules keep between forwards: what depends on it follows from how many forwards there were.

Drafting makes fewer forwards than plain decoding, and trials make more. So nothing is drafted for a target whose
modules store attributes that they read, or hold something that the prompts' forward has changed.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .foreign_code import is_foreign
from .recording_hooks import ADDS

_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_COUNTERS = (itertools.count, itertools.cycle, itertools.repeat)
_OF_MODULES = frozenset(vars(nn.Module()))
_LOADS = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_CLOSURE")
_MOST_BYTES = 2**20  # of an array that is compared
_MOST_ITEMS, _DEEPEST = 64, 3
_NOT_IN_FORWARDS = ("__init__", "__new__", "reset", "reset_parameters", "extra_repr", "train", "__getattr__")


class State:
    """What some modules hold, apart from weights; compares equal to what they hold later if nothing has changed."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        self._parts, self._held = parts, _held_by(parts)

    def changed(self) -> str:
        """What has changed since, by name; empty if nothing has."""
        now = _held_by(self._parts)
        return next((name for name in self._held.keys() | now.keys() if self._held.get(name) != now.get(name)), "")


def stored_and_read(kind: type, forward: Any) -> str:
    """The name of an attribute that a module's forward, or another method of its class, both stores and reads."""
    functions = list(functions_of(kind, forward))
    stores = {name for each in functions for name in _stored(each.__code__)}
    return min(stores & {name for each in functions for name in _read(each.__code__)}, default="")


def _stored(code: types.CodeType) -> Iterator[str]:
    """Attributes of the module that a method stores."""
    for before, step in itertools.pairwise(dis.get_instructions(code)):
        of_module = before.argval in code.co_varnames[:1] or not before.opname.startswith("LOAD_")
        if step.opname == "STORE_ATTR" and of_module:
            yield step.argval


def _read(code: types.CodeType) -> Iterator[str]:
    """Names that a function reads, and not only to add to what they hold, which is not read then."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for step, after in itertools.pairwise(steps):
        adds = after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval in ADDS
        if (
            step.opname.startswith(("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_CLOSURE"))
            and not adds
        ):
            yield step.argval
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _read(each)


def functions_of(kind: type, forward: Any) -> Iterator[Any]:
    """A module's forward, and the other methods of its class and of those above it that are not of a known library."""
    methods = [value for base in kind.__mro__ for name, value in vars(base).items() if name not in _NOT_IN_FORWARDS]
    for each in {id(each): each for each in (getattr(forward, "__func__", forward), *methods)}.values():
        if inspect.isfunction(each) and is_foreign(each):
            yield each


def _held_by(parts: dict[str, nn.Module]) -> dict[str, Any]:
    functions = {
        name: list(functions_of(type(part), vars(part).get("forward") or type(part).forward))
        for name, part in parts.items()
    }
    read = {each: frozenset(_read(each.__code__)) for several in functions.values() for each in several}
    every, held = frozenset[str]().union(*read.values()), dict[str, Any]()
    for name, part in parts.items():
        own = {key: value for key, value in list(vars(part).items()) if key not in _OF_MODULES} | part._buffers
        held |= {f"{name}.{key}": _mark(value) for key, value in own.items() if key in every}
    for function, names in read.items():
        cells = zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
        named = {key: value for key, value in (*list(function.__globals__.items()), *cells) if key in names}
        held |= {f"{function.__qualname__}: {key}": _mark(value) for key, value in named.items()}
    return held


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


class _Same:
    """An object that equals itself alone; held, so that another cannot take its place in memory."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _mark(value: Any, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return _Same(value), 0 if value.is_inference() else value._version
    if isinstance(value, (*_PLAIN, *_COUNTERS)):
        return repr(value)
    if isinstance(value, np.ndarray):
        return _Same(value), hash(value.tobytes()) if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, _CONTAINERS) and depth < _DEEPEST:
        items = value.items() if isinstance(value, dict) else value
        return type(value), len(value), [_mark(each, depth + 1) for each in itertools.islice(items, _MOST_ITEMS)]
    if isinstance(value, functools.partial | type | nn.Module) or inspect.isroutine(value) or inspect.ismodule(value):
        return _Same(value)
    if depth < _DEEPEST and hasattr(value, "__dict__") and not hasattr(value, "to_dict"):
        return _Same(value), _mark(vars(value), depth + 1)
    return _Same(value)
