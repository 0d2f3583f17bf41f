"""Parts of a target, whatever its attributes are named: its list of decoder layers, and the norm after the last one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

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
