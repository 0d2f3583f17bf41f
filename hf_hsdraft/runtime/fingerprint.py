"""Fingerprint of what determines a model's forwards. Findings about a model are valid while it is unchanged."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PACKAGE = __name__.partition(".")[0]


def fingerprint(model: nn.Module) -> int:
    """A hash of hooks, replaced forwards, attention, adapters, module classes and weight dtypes.

    Hooks of transformers and of this package are ignored: they only keep outputs, and exist only within a call. The
    state of a hook is ignored too; a hook whose effect changes must be registered again.
    """
    parts: list[Any] = [*of_all_modules._global_forward_hooks, *of_all_modules._global_forward_pre_hooks]
    kinds, attentions = set(), set()
    for module in model.modules():
        own, kind = vars(module), type(module)
        kinds.add(kind)
        parts.append(kind)
        parts += ((type(weight), weight.dtype) for weight in own["_parameters"].values() if weight is not None)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            parts += (_hook(number, hook) for number, hook in foreign_hooks(module))
        parts += (_serial(own[name]) for name in ("forward", "_compiled_call_impl") if own.get(name) is not None)
        if "_active_adapter" in own:  # of PEFT
            parts += (str(own["_active_adapter"]), own.get("_disable_adapters"), str(own.get("merged_adapters")))
        if (name := getattr(own.get("config"), "_attn_implementation", None)) is not None:
            attentions.add(name)
    parts.append(frozenset((kind, _serial(kind.forward)) for kind in kinds))
    parts.append(frozenset((str(name), _serial(ALL_ATTENTION_FUNCTIONS.get(name))) for name in attentions))
    return hash(tuple(parts))


def has_foreign_hooks(model: nn.Module) -> bool:
    """Whether hooks of other libraries observe or change what passes through a model's modules."""
    return any(any(foreign_hooks(module)) for module in model.modules())


def foreign_hooks(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """Hooks around a module's forward by other libraries, with their numbers, which are never reused."""
    for number, hook in itertools.chain(module._forward_pre_hooks.items(), module._forward_hooks.items()):
        if _library(hook) not in ("transformers", _PACKAGE):
            yield number, hook


def _hook(number: int, hook: Any) -> Any:
    """Identity of a hook: its number, except for hooks that PEFT registers in each call."""
    if isinstance(hook, functools.partial) and _library(hook.func) == "peft":
        return _serial(hook.func), str(hook.args), str(hook.keywords)
    return number


def _library(function: Any) -> str:
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def _serial(function: Any) -> int:
    """A unique number for a function, not reused after the function is gone."""
    function = inspect.unwrap(function) if getattr(function, "_hsdraft", None) is not None else function
    try:
        return _serials.setdefault(function, next(_numbers))
    except TypeError:  # not hashable, or no weak references
        return id(function)


_numbers = itertools.count()
_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
