"""Parts of a target, whatever its attributes are named: its list of decoder layers, and the norm after the last one."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

from ..core.refusals import DraftingRefused
from ..core.stand_ins import Placed, is_compiled
from .target_limits import decoder_layers, text_config


def decoder_list(model: Any) -> tuple[str, nn.ModuleList]:
    """Returns the name and the list of a model's decoder layers; raises a ValueError unless exactly one list fits.

    The list has as many entries as the text configuration has layers. Among several, such as lists of experts or of an
    image encoder, it is the one in the decoder whose layers have a `layer_idx`.
    """
    count = decoder_layers(text_config(model))
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    found = [(name, each) for name, each in lists if len(each) == count]
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    start = next((name for name, module in model.named_modules() if module is decoder), "")  # "" for the model itself
    found = [pair for pair in found if not start or pair[0].startswith(f"{start}.")] or found
    if len(found) > 1:
        found = [(name, each) for name, each in found if any(hasattr(part, "layer_idx") for part in each.modules())]
        found = [pair for pair in found if not any(pair[0].startswith(f"{other}.") for other, _ in found)]
    if len(found) != 1:
        raise ValueError(
            f"the layers of {type(model).__name__} cannot be found: expected one list of {count} layers, as its "
            f"configuration has, found {len(found)}"
        )
    return found[0]


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


def decoding_model(model: Any) -> Any:
    """Unwraps the model whose `generate()` runs in the end."""
    while isinstance(model, torch.nn.Module) and not isinstance(model, GenerationMixin):
        names = ("base_model", "model", "_orig_mod", "module")  # of PEFT, `torch.compile` and data-parallel wrappers
        inner = next((model._modules[name] for name in names if name in model._modules), None)
        if inner is None:
            break
        model = inner
    return model


_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "layer_norm")


def final_norm(target: Any) -> nn.Module | None:
    """The norm after the last layer; `None` where a target has none by a usual name."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    found = (getattr(decoder, name, None) for name in _NAMES)
    return next((each for each in found if isinstance(each, nn.Module)), None)


def reads_last(target: Any) -> nn.Module | None:
    """The module that reads the last layer's output: the final norm, or the mixer of several streams of states."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    return final_norm(target) or getattr(decoder, "hyper_connection_mixer", None)


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


class LastState:
    """Keeps the last layer's output before the norm, for a target of `layers` layers."""

    def __init__(self, norm: nn.Module, layers: int) -> None:
        self._norm, self._layers, self._state = norm, layers, torch.empty(0)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward: keeps the norm's input, of this thread only."""
        thread = threading.get_ident()

        def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if threading.get_ident() == thread:  # other threads may decode with the same target
                self._state = inputs[0].detach()

        hook = self._norm.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def behind(self, states: Any) -> Any:
        return (*(states or (None,) * (self._layers + 1)), self._state)
