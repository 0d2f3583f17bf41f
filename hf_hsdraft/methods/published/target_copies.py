"""Copies of a target that share its weights, with other modules in place of some; and its last layer's output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ...core.refusals import DraftingRefused
from ...core.stand_ins import Placed, is_compiled
from ...runtime.target_parts import reads_last


def why_not_replaced(model: Any, names: Iterable[str]) -> str:
    """Returns why `with_modules` cannot replace these modules; empty if it can."""
    paths = ("", *(path for name in names for path in itertools.accumulate(name.split(".")[:-1], "{}.{}".format)))
    return why_not_copied(map(model.get_submodule, dict.fromkeys(paths)))


def why_not_copied(modules: Iterable[nn.Module]) -> str:
    """Returns why copies of these modules would still run the modules themselves; empty if they would not."""
    for module in modules:
        if vars(module).get("forward") is not None or is_compiled(module):
            kind = type(module).__name__
            return f"the forward of {kind} was replaced: by torch.compile, or by hooks of accelerate"
    return ""


def with_modules(model: Any, replaced: Mapping[str, nn.Module]) -> Any:
    """Returns a copy of a model with other modules by name. Modules above them are copied, all others shared."""
    copies = {"": shallow_copy(model)}
    for name, module in replaced.items():
        above, _, last = name.rpartition(".")
        _copy_of(copies, above)._modules[last] = module
    return copies[""]


def _copy_of(copies: dict[str, Any], name: str) -> Any:
    """Returns the copy of a module of the model whose copies these are, made with those above it."""
    if name not in copies:
        above, _, last = name.rpartition(".")
        modules = _copy_of(copies, above)._modules
        copies[name] = modules[last] = shallow_copy(modules[last])
    return copies[name]


def shallow_copy(module: Any) -> Any:
    """Returns a copy of a module whose submodules can be replaced; all else is shared."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = dict(module._modules)
    if isinstance(made._compiled_call_impl, Placed):  # of another thread's call, it would run the module itself
        del made.__dict__["_compiled_call_impl"]
    return made


def refuse_sharded(part: str, all_processes: bool) -> None:
    """Raises a DraftingRefused where a draft runs a part of a target whose forwards take all processes at once."""
    if all_processes:
        raise DraftingRefused(
            f"{part} of a target that is sharded over processes cannot draft: its forwards take all of them at once. "
            f"To decode it plainly, {DraftingRefused.PLAINLY}."
        )


class InPlaceOf(nn.Module):
    """For `with_modules`: computes `run`, and has the attributes of a layer, which is not a submodule."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(_layer=layer, _run=run)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_run"](*args, **kwargs)


def before_norm(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """Returns tap indices for a target of `layers` layers where the last layer is tapped before the norm."""
    return tuple(tap + 1 if tap == layers else tap for tap in taps)


def check_last_state(target: Any) -> None:
    """Raises a DraftingRefused if the last layer's output before the norm is not available."""
    if reads_last(target) is None:
        raise DraftingRefused(
            "the drafter reads the output of the last layer before the target's final norm, and a "
            f"{type(target).__name__} has none by a name that is known here. Use a drafter that reads lower layers "
            "only."
        )
