"""State that the user's modules keep between forwards: what depends on it follows from how many forwards there were.

Drafting makes fewer forwards than plain decoding, and trials make more. So what the user's modules hold is compared
with what they held before. Some change only in single steps, which a trial would run too often: so the first call of a
target with such modules drafts nothing, and shows whether they do.
"""

from __future__ import annotations

import array
import collections
import functools
import itertools
import random
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .foreign_code import LIBRARIES, is_foreign
from .module_hooks import fingerprint

_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SHOWN = (itertools.count, itertools.cycle, itertools.repeat, bytearray, array.array)
_OBJECTS = Cache | CacheLayerMixin | PreTrainedConfig  # a library's, in which code of the user's may keep something
_LEAVES = LIBRARIES | {"logging"}
_WEIGHTS = {"_parameters", "_buffers", "_modules"}
_OF_MODULES = frozenset(vars(nn.Module()))
_MOST_NUMBERS = 2**12  # of a tensor that is compared by them
_MOST_OBJECTS = 20_000

# Forms of targets, by `fingerprint`, whose own modules have changed nothing in a call.
_steady: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()


class Watch:
    """Compares what the user's modules of a target hold with what they held at the beginning of a call."""

    def __init__(self, target: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self._target, self._parts = target, parts
        self._held = _held_by(parts) if parts else {}

    def changed(self) -> str:
        """The name of something that has changed since the call began; empty if nothing has."""
        now = _held_by(self._parts) if self._parts else {}
        pairs = ((name, own, now.get(key)) for key, (name, own, _) in self._held.items())
        return next((name for name, own, later in pairs if later is None or later[1] != own), "")

    def why_not(self) -> str:
        """Why nothing may be drafted, after the prompts' forward; empty if something may."""
        if changed := self.changed():
            return f"{changed} changes in forwards, and a draft makes fewer of them"
        if self._parts and fingerprint(self._target) not in _steady.get(self._target, ()):
            name = next(iter(self._parts))
            return (
                f"{name} is not transformers' own, and is watched in this call for what it changes; later calls draft, "
                "or mark its forward with hf_hsdraft.harmless()"
            )
        return ""

    def end(self, forwards: int) -> None:
        """After a call of so many forwards: later ones may draft, unless something has changed."""
        if self._parts and forwards > 1:
            steady, form, changed = _steady.setdefault(self._target, set()), fingerprint(self._target), self.changed()
            if len(steady) > 64:  # of a target that changes from call to call
                steady.clear()
            (steady.discard if changed else steady.add)(form)


def _held_by(parts: Mapping[str, nn.Module]) -> dict[int, tuple[str, Any, Any]]:
    """All that modules have at hand: by id of each object its name, what it contains, and itself."""
    found, waiting, roots = dict[int, tuple[str, Any, Any]](), [*parts.items()], {id(part) for part in parts.values()}
    while waiting and len(found) < _MOST_OBJECTS:
        name, value = waiting.pop()
        if id(value) in found:
            continue
        try:
            held = list(_items(value, id(value) in roots))
            plain = [(key, repr(each)) if isinstance(each, _PLAIN) else (key, id(each)) for key, each in held]
            waiting += [(f"{name}.{key}", each) for key, each in held if not isinstance(each, _PLAIN)]
            contents: Any = _marks(value), plain
        except Exception:  # it cannot be compared
            contents = object()
        found[id(value)] = name, contents, value  # held, so that no other object takes its id
    if waiting:
        found[0] = waiting[0][0], object(), None
    return found


def _marks(value: Any) -> Any:
    """What an object contains that is not an object by itself."""
    if isinstance(value, torch.Tensor):
        small = type(value) in (torch.Tensor, nn.Parameter) and value.numel() <= _MOST_NUMBERS and not value.is_meta
        return None if value.is_inference() else value._version, repr(value.tolist()) if small else None
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _SHOWN):
        return repr(value)
    return object() if isinstance(value, Iterator) else None


def _items(value: Any, is_part: bool) -> Iterator[tuple[str, Any]]:
    """What an object holds, with names; nothing of a known library's object."""
    if isinstance(value, Mapping):
        yield from ((f"{key!r:.20}", each) for key, each in list(value.items()))
        yield from (("key", key) for key in list(value))
    elif isinstance(value, _CONTAINERS):
        yield from ((str(index), each) for index, each in enumerate(list(value)))
    elif isinstance(value, types.MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from _at_hand(value) if is_foreign(value) else ()
    elif isinstance(value, types.ModuleType):
        if _is_of_user(value.__name__):
            yield from ((key, each) for key, each in vars(value).items() if isinstance(each, (*_PLAIN, *_CONTAINERS)))
    elif isinstance(value, type):
        if _is_of_user(value.__module__):
            yield from ((key, each) for key, each in vars(value).items() if key == "__call__" or key[:2] != "__")
            yield from ((base.__name__, base) for base in value.__bases__)
    elif isinstance(value, nn.Module | _OBJECTS) or type(value).__module__.partition(".")[0] not in _LEAVES:
        yield type(value).__name__, type(value)
        hidden: Any = _OF_MODULES if isinstance(value, nn.Module) else ()
        if isinstance(value, nn.Module) and (is_part or _is_of_user(type(value).__module__)):
            hidden = _OF_MODULES - _WEIGHTS
        yield from ((key, each) for key, each in list(getattr(value, "__dict__", {}).items()) if key not in hidden)
        members = (member for base in type(value).__mro__ for member in vars(base).items())
        slots = [name for name, member in members if isinstance(member, types.MemberDescriptorType)]
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))


def _is_of_user(space: str) -> bool:
    return space.partition(".")[0] not in LIBRARIES | sys.stdlib_module_names


def _at_hand(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads besides its arguments: its closure, defaults, and the globals that it names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType())
    yield from (("defaults", function.__defaults__), ("keywords", function.__kwdefaults__))
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
