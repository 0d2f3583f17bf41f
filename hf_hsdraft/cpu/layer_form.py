"""What a compiled decoder layer was traced from: the layer without its weights, and the form of its call.

Layers of equal `description` called in equal forms run the same program with different weights.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import logging
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.utils.generic import GeneralInterface

MASK, CACHE = "attention_mask", "cache"
_DEEPEST = 2  # of the functions called by a layer's forward that its digest covers
_OF_THE_MODEL = "output_hidden_states"  # handed down to layers, which do not read it
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
# A stand-in of another thread's call may be in place of a module's call.
OF_EVERY_MODULE = (frozenset(vars(nn.Module())) | {"_compiled_call_impl"}) - {"training"}
_UNREAD = {"training", "in_features", "out_features", "_is_hf_initialized"}  # by torch's linear layers


class CannotCompile(Exception):
    """A layer, or its call, does something that a program cannot repeat."""


def description_of(layer: nn.Module, described: dict[Any, str]) -> str:
    """All that decides what a layer computes, except for the numbers in its weights and its index.

    `described` has the configurations and classes of modules that were described before. Raises a CannotCompile if an
    attribute, or what a forward reads besides its arguments, is neither plain, a configuration nor a function.
    """
    return "\n".join(f"{name}: {_describe(module, described)}" for name, module in layer.named_modules())


def read_of(module: nn.Module) -> list[str]:
    """The names of a module's own attributes that its forward may read."""
    unread = OF_EVERY_MODULE | _UNREAD if type(module) is nn.Linear else OF_EVERY_MODULE
    return [name for name in vars(module) if name not in unread]


def _describe(module: nn.Module, described: dict[Any, str]) -> str:
    own, tensors, kind = vars(module), dict[str, Any](), type(module)
    for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
        tensors[name] = None if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype)
    if kind not in described:
        described[kind] = described_kind(kind)
    parts = [f"{described[kind]} {tensors}"]
    for name in read_of(module):
        value = own[name]
        if isinstance(value, PreTrainedConfig):
            if id(value) not in described:
                described[id(value)] = described_config(value)
            parts.append(described[id(value)])
        elif name == "forward":
            raise CannotCompile("its forward was replaced")
        elif name != "layer_idx":
            parts.append(f"{name}={plain(value)}")
    return " ".join(parts)


def described_kind(kind: type) -> str:
    """What modules of a class compute, but for their attributes."""
    return f"{plain(kind)} {_code_of(kind)}"


def described_config(config: Any) -> str:
    """All that a configuration says."""
    return f"{config.to_json_string()} {config._attn_implementation}"


def is_fixed(value: Any) -> bool:
    """Whether what `plain` says of a value is always the same."""
    return isinstance(value, (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))


def _code(function: Any, within: tuple[Any, ...] = ()) -> str:
    """A digest of a function's code, and of what it reads and calls now: names may get other values at any time."""
    space, (names, contents) = function.__globals__, _read_by(function.__code__)
    reads: dict[str, Any] = {name: space[name] for name in names if name in space}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    reads |= {f"{name} outside": cell.cell_contents for name, cell in cells}
    reads |= {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    held = [f"{name}={plain(value)}" for name, value in reads.items()]
    held += [
        _code(each, (*within, function))
        for each in reads.values()
        if inspect.isfunction(each) and each is not function and each not in within and len(within) < _DEEPEST
    ]
    return hashlib.sha256(f"({contents}, {held!r})".encode()).hexdigest()[:16]


@functools.lru_cache(1024)
def _read_by(code: types.CodeType) -> tuple[list[str], str]:
    """The global names that code reads, and what it consists of; both with the functions inside."""
    codes = [code]
    for each in codes:  # grows
        codes += [part for part in each.co_consts if isinstance(part, types.CodeType)]
    steps = (step for each in codes for step in dis.get_instructions(each) if step.opname == "LOAD_GLOBAL")
    constants = [part for each in codes for part in each.co_consts if not isinstance(part, types.CodeType)]
    return [step.argval for step in steps], f"{[(each.co_code, each.co_names) for each in codes]}, {constants}"


def _code_of(kind: type) -> str:
    """A digest of the code of a module's forward, which may be replaced at any time."""
    forward: Any = inspect.unwrap(getattr(kind, "forward"))  # noqa: B009 classes of modules have one
    if not hasattr(forward, "__code__"):
        raise CannotCompile("its forward is no Python function")
    return _code(forward)


def plain(value: Any) -> str:
    """A value in words; raises a CannotCompile for what is neither plain, a function nor a container of these."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list | set | frozenset):
        return f"{type(value).__name__}({', '.join(map(plain, value))})"
    if isinstance(value, GeneralInterface):  # what is registered there is named by the configuration
        return type(value).__name__
    if isinstance(value, dict):
        return str({plain(key): plain(each) for key, each in value.items()})
    if isinstance(value, functools.partial):
        return f"partial({plain(value.func)}, {plain(value.args)}, {plain(value.keywords)})"
    if isinstance(value, types.ModuleType | logging.Logger):
        return f"{type(value).__name__} {vars(value).get('__name__') or vars(value).get('name')}"
    if hasattr(value, "__qualname__") and hasattr(value, "__module__"):  # a function or class
        return f"{value.__module__}.{value.__qualname__}"
    raise CannotCompile(f"it reads a {type(value).__name__}")


@dataclass(frozen=True)
class Argument:
    """One argument of a layer's call, or one item of a tuple among them.

    Attributes:
        name: its keyword; `None` for the first positional one, the only one.
        item: its index in a tuple; `None` if it is no tuple's.
        dtype: of a tensor `[B or 1, n, ...]`; `None` otherwise.
        shared: whether a tensor has one row for all texts of a batch.
        sizes: of a tensor, after the first two axes.
        constant: the value, if not a tensor; `MASK` and `CACHE` stand for the mask and the cache.
    """

    name: str | None
    item: int | None = None
    dtype: torch.dtype | None = None
    shared: bool = False
    sizes: tuple[int, ...] = ()
    constant: Any = None


Form = tuple[Argument, ...]


def form_of(hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Form, list[torch.Tensor]] | None:
    """The form of a layer's call, and its tensors; `None` if it is no call of a tree or a single token."""
    mask, rows = kwargs.get(MASK), hidden_states.shape[:2]
    if cache_of(kwargs) is None or (rows[1] > 1 and (mask is None or mask.dim() != 4)):
        return None
    form, tensors = [], []
    for name, value in ((None, hidden_states), *kwargs.items()):
        if name == MASK or isinstance(value, Cache):
            form.append(Argument(name, constant=MASK if name == MASK else CACHE))
            continue
        if name == _OF_THE_MODEL:
            continue
        items = enumerate(value) if isinstance(value, tuple) else ((None, value),)
        for item, each in items:
            if isinstance(each, torch.Tensor):
                if not each.is_contiguous():
                    return None
                shared = each.shape[0] == 1 < rows[0] if each.dim() > 1 else True
                if each.dim() < 2 or each.shape[:2] != ((1 if shared else rows[0]), rows[1]):
                    return None
                form.append(Argument(name, item, each.dtype, shared, tuple(each.shape[2:])))
                tensors.append(each)
            elif isinstance(each, _PLAIN):
                form.append(Argument(name, item, constant=each))
            else:
                return None
    return tuple(form), tensors


def cache_of(kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the keywords of a layer's call, whatever its name there."""
    return next((value for value in kwargs.values() if isinstance(value, Cache)), None)


def arguments_of(form: Form, tensors: Sequence[torch.Tensor], mask: Any, cache: Any) -> tuple[Any, dict[str, Any]]:
    """The hidden states and keywords of a call of this form."""
    given, kwargs, named = iter(tensors), dict[str | None, Any](), {MASK: mask, CACHE: cache}
    for each in form:
        value = next(given) if each.dtype is not None else named.get(each.constant, each.constant)
        kwargs[each.name] = value if each.item is None else (*kwargs.get(each.name, ()), value)
    return kwargs.pop(None), {str(name): value for name, value in kwargs.items()}
