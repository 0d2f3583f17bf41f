"""Forward hooks that only record: they return nothing, change nothing that they are given, and call nothing unknown.

Such a hook cannot change a text, however many forwards call it. This follows from its bytecode; a hook of which it does
not is taken for one that may.
"""

from __future__ import annotations

import builtins
import collections
import dis
import inspect
import itertools
import logging
import threading
import types
from collections.abc import Iterator
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What is read of tensors, outputs and containers.
_READS = _names(
    "shape size dim ndim numel dtype device detach clone cpu float double half to mean norm abs max min sum std var "
    "item tolist numpy last_hidden_state hidden_states logits attentions get keys values items index count join format "
    "perf_counter monotonic time sleep current_thread get_ident __name__ __class__"
)
_OF_A_MODULE = ("__class__", "training")
# What adds to a container of the hook, or waits.
ADDS = _names(
    "append appendleft extend add update setdefault put put_nowait set is_set wait acquire release debug info"
)
_BUILTINS = _names(
    "len isinstance print str int float bool list tuple dict set range enumerate zip sum max min abs round sorted any "
    "all type repr id"
)
_PLAIN: tuple[type, ...] = (
    bool,
    int,
    float,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    collections.deque,
    logging.Logger,
    itertools.count,
)
_PLAIN += (type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Thread, threading.local)
_NO_STEPS = ("CACHE", "RESUME", "PRECALL", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL", "NOP")
_MODULES = ("time", "threading", "torch")
# Steps that compute and branch; any other one, of a newer Python too, is not known to be harmless.
_COMPUTES = (
    "LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "POP_",
    "BINARY_", "UNARY_", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "BUILD_", "LIST_", "SET_", "DICT_", "MAP_", "FORMAT_",
    "CONVERT_VALUE", "TO_BOOL", "CALL", "KW_NAMES", "JUMP", "SWAP", "COPY", "RETURN_", "FOR_ITER", "GET_ITER",
    "GET_LEN", "END_FOR", "UNPACK_", "BEFORE_WITH", "WITH_EXCEPT_START", "PUSH_EXC_INFO", "RERAISE", "CHECK_EXC_MATCH",
)  # fmt: skip
_WRITES = (
    "DELETE_",
    "IMPORT_",
    "YIELD",
    "STORE_SLICE",
    "MAKE_FUNCTION",
    "STORE_FAST_STORE_FAST",
    "LOAD_BUILD_CLASS",
    "STORE_NAME",
)


_SINGLE = ("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL")


def only_records(hook: Any) -> bool:
    """Whether a hook can be seen to do nothing but record."""
    owner = getattr(hook, "__self__", None)
    function = getattr(hook, "__func__", hook)
    if not inspect.isfunction(function):
        owner, function = hook, type(hook).__call__
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return False
    held = [*_held_by(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(each is None or _is_plain(each) for each in held) and _is_harmless(function, owner)


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            yield None


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _is_harmless(function: types.FunctionType, owner: Any) -> bool:
    code = function.__code__
    steps = [each for each in dis.get_instructions(code) if each.opname not in _NO_STEPS]
    me = code.co_varnames[0] if owner is not None and code.co_argcount else ""
    module = code.co_varnames[bool(me)] if code.co_argcount > bool(me) else ""
    if any(isinstance(each, tuple) and "out" in each for each in code.co_consts):
        return False
    for place, step in enumerate(steps):
        kind, name, before = step.opname, step.argval, steps[max(place - 2, 0) : place]
        on = before[-1].argval if before else None
        of_me = me != "" and on == me
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            if of_me:
                harmless = _is_plain(getattr(owner, name, None))
            elif name in ADDS:
                harmless = _is_own(before, function, me)
            else:
                harmless = name in (_OF_A_MODULE if on == module else _READS)
        elif kind == "LOAD_GLOBAL":
            harmless = _is_known(name, function.__globals__)
        elif kind == "STORE_ATTR":
            harmless = of_me
        elif kind == "STORE_SUBSCR":
            single = bool(before) and before[-1].opname.startswith(
                ("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL")
            )
            harmless = single and len(before) > 1 and _is_own(before[:1], function, me)
        elif kind.startswith("INPLACE_") or (kind == "BINARY_OP" and step.argrepr.endswith("=")):
            harmless = steps[place + 1].opname.startswith(("STORE_DEREF", "STORE_GLOBAL"))
        else:
            harmless = kind.startswith(_COMPUTES) and not kind.startswith(_WRITES)
        if not harmless:
            return False
    return _returns_nothing(code, steps)


def _is_own(before: list[Any], function: types.FunctionType, me: str) -> bool:
    """Whether what was loaded last is held by the hook, and not given to it."""
    if not before:
        return False
    last, defaults = before[-1], function.__kwdefaults__ or {}
    of_me = len(before) > 1 and me != "" and before[-2].argval == me and last.opname == "LOAD_ATTR"
    by_default = last.opname.startswith("LOAD_FAST") and last.argval in defaults
    return last.opname in ("LOAD_DEREF", "LOAD_GLOBAL") or of_me or by_default


def _is_known(name: str, space: dict[str, Any]) -> bool:
    if name not in space:
        found = getattr(builtins, name, None)
        return name in _BUILTINS or (isinstance(found, type) and issubclass(found, BaseException))
    value = space[name]
    if isinstance(value, types.ModuleType):
        return value.__name__ in _MODULES
    return _is_plain(value)


def _returns_nothing(code: types.CodeType, steps: list[Any]) -> bool:
    """Whether only `None` is returned, or by a lambda what a container's method returns that adds to it."""
    for place, step in enumerate(steps):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
        if step.opname == "RETURN_VALUE":
            last = steps[place - 1]
            nothing = last.opname == "LOAD_CONST" and last.argval is None
            if not (nothing or (code.co_name == "<lambda>" and last.opname.startswith("CALL") and _adds(steps))):
                return False
    return True


def _adds(steps: list[Any]) -> bool:
    return len(steps) > 2 and steps[1].argval in ADDS and not any("JUMP" in each.opname for each in steps)
