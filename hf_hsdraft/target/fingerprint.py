"""What a model's forwards are made of. What was found out about a model holds while that is the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

_PACKAGE = __name__.partition(".")[0]
_EXACT = ("torch", "transformers", "peft", _PACKAGE)


def fingerprint(model: nn.Module) -> int:
    """A number that changes with hooks, replaced forwards, adapters, classes of modules, and dtypes of weights.

    Hooks of transformers and of this package are left out: they keep outputs, and come and go within a call.
    """
    parts: list[Any] = [*of_all_modules._global_forward_hooks, *of_all_modules._global_forward_pre_hooks]
    kinds = set()
    for module in model.modules():
        own, kind = vars(module), type(module)
        kinds.add(kind)
        parts.append(kind)
        parts += ((type(weight), weight.dtype) for weight in own["_parameters"].values() if weight is not None)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            parts += (number for number, _ in foreign_hooks(module))
        parts += (id(own[name]) for name in ("forward", "_compiled_call_impl") if own.get(name) is not None)
        if "_active_adapter" in own:  # of PEFT
            parts += (str(own["_active_adapter"]), own.get("_disable_adapters"), str(own.get("merged_adapters")))
    parts.append(frozenset((kind, id(kind.forward)) for kind in kinds))
    return hash(tuple(parts))


def may_round(model: nn.Module) -> bool:
    """Whether a model has weights or modules of other libraries, whose products may round what they are given."""
    return any(
        type(module).__module__.partition(".")[0] not in _EXACT
        or any(weight is not None and type(weight) is not nn.Parameter for weight in module._parameters.values())
        for module in model.modules()
    )


def foreign_hooks(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """The hooks around a module's forward that others put there, each with its number, which is never reused."""
    for number, hook in itertools.chain(module._forward_pre_hooks.items(), module._forward_hooks.items()):
        if getattr(hook, "__module__", "").partition(".")[0] not in ("transformers", _PACKAGE):
            yield number, hook
