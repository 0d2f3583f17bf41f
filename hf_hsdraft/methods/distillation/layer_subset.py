"""Models made of a subset of a model's layers, for pruning and for drafting."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...core.checks import are_ascending, demand, is_integer
from ...core.tensors import hooks_of
from ...runtime.module_hooks import CAPTURES
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import decoder_list


def layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """Returns the name and list of the model's layers; raises a ValueError if layers depend on each other."""
    if getattr(text_config(model), "num_kv_shared_layers", 0):
        raise ValueError(
            f"{type(model).__name__} cannot do without some layers: later ones share the keys and values of others"
        )
    return decoder_list(model)


def checked_layers(model: Any, kept: Sequence[int]) -> list[int]:
    """Returns the indices of layers to keep; raises a ValueError unless they are ascending, distinct and in range."""
    count = decoder_layers(text_config(model))
    numbers = list(kept)
    if not numbers or not are_ascending(numbers, 0, count - 1):
        raise ValueError(f"layers {numbers} are invalid: expected ascending numbers from 0 to {count - 1}, each once")
    return numbers


def evenly(num_layers: int, num_kept: int, name: str = "num_layers") -> list[int]:
    """Returns layers spread evenly, the first and the last included; a ValueError, on `name`, if there are fewer."""
    demand(1 <= num_kept <= num_layers, name, num_kept, f"expected 1 to {num_layers}, as many as the model has")
    return [round(place * (num_layers - 1) / max(num_kept - 1, 1)) for place in range(num_kept)]


def with_layers(model: Any, kept: Sequence[int]) -> Any:
    """Returns a model with the layers `kept` (ascending indices), which shares the weights but nothing else.

    Its configuration has the new number of layers, and cache slots are renumbered. Raises a ValueError if there are no
    such layers, or layers depend on each other.
    """
    numbers = checked_layers(model, kept)
    name, layers = layers_of(model)
    count = len(layers)
    copied = sharing_weights(model)
    parent, _, own_name = name.rpartition(".")
    chosen = [copied.get_submodule(f"{name}.{number}") for number in numbers]
    setattr(copied.get_submodule(parent), own_name, nn.ModuleList(chosen))
    for number, layer in enumerate(chosen):
        for part in layer.modules():
            if is_integer(getattr(part, "layer_idx", None)):
                part.layer_idx = number
    _shorten(text_config(copied), numbers, count)
    return copied


def sharing_weights(model: Any) -> Any:
    """Returns a copy with the same parameters and buffers, but new modules without hooks."""
    offloaded = [hook.weights_map for hook in hooks_of(model) if getattr(hook, "weights_map", None) is not None]
    shared = {id(held): held for held in (*model.parameters(), *model.buffers(), *offloaded)}
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():  # hooks belong to the original
        module.__dict__.pop(CAPTURES, None)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return copied


def _shorten(config: Any, kept: Sequence[int], count: int) -> None:
    """Removes dropped layers from a configuration, including from lists with an entry per layer."""
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, [value[number] for number in kept])
    config.num_hidden_layers = len(kept)
