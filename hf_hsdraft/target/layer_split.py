"""A target's decoder in two parts: its first layers alone, and all others after what the first ones have made.

Each part is a copy of the target that has other modules in the place of some layers, and shares all else. Nothing is
written to the target, so other calls of it may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .text_configs import decoder_layers, text_config


def why_not_split(target: Any) -> str:
    """Returns why the layers of a target cannot be taken apart; an empty string if they can be."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    path = _path_to_layers(target)
    if not path:
        return f"{name} has no single list of {decoder_layers(text_config(target))} decoder layers"
    module = target
    for part in path:
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            return f"the forward of {type(module).__name__} was replaced: by torch.compile, or by hooks of accelerate"
        module = getattr(module, part)
    return ""


def weights_of_a_layer(target: Any) -> int:
    """Returns the mean number of weights of a decoder layer; 0 where the layers cannot be told."""
    layers = _layers(target, _path_to_layers(target))
    return sum(weight.numel() for layer in layers for weight in layer.parameters()) // max(len(layers), 1)


class LayerSplit:
    """A target's decoder layers in two parts.

    Args:
        target: the target; `why_not_split` has nothing against it.
        count: number of the first layers.
    """

    def __init__(self, target: Any, count: int) -> None:
        self._target, self._count = target, count
        self._path = _path_to_layers(target)
        self._layers = _layers(target, self._path)
        first = [*self._layers[: count - 1], _Last(self._layers[count - 1])]
        self._first = _with_layers(target, self._path, first)

    def first_states(self, run: Callable[[Any], Any]) -> torch.Tensor:
        """Returns the hidden states after the first layers. Nothing else is computed.

        Args:
            run: runs the forward of the model that it is given.
        """
        try:
            run(self._first)
        except _Reached as reached:
            return reached.states
        raise ValueError(f"{type(self._target).__name__} did not run layer {self._count} of its decoder")

    def model_after(self, states: torch.Tensor, read: Callable[[], None]) -> Any:
        """Returns a model that computes the other layers after known hidden states.

        Args:
            states: `[B, n, D]`, hidden states after the first layers.
            read: called in the place of the first layers: they would write into the cache.
        """
        last = self._count - 1
        passed = [_Passed(layer) for layer in self._layers[:last]]
        layers = [*passed, _Known(self._layers[last], states, read), *self._layers[last + 1 :]]
        return _with_layers(self._target, self._path, layers)


class _InPlaceOf(nn.Module):
    """Stands in the place of a layer, whose attributes it has.

    Args:
        layer: the layer. It is no part of this module.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


class _Reached(Exception):
    """The last layer that is wanted has been computed.

    Attributes:
        states: `[B, n, D]`, its hidden states.
    """

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class _Last(_InPlaceOf):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        states = self.__dict__["_layer"](*args, **kwargs)
        if not isinstance(states, torch.Tensor):
            raise ValueError(f"{type(self.__dict__['_layer']).__name__} returns more than hidden states")
        raise _Reached(states)


class _Passed(_InPlaceOf):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class _Known(_InPlaceOf):
    def __init__(self, layer: nn.Module, states: torch.Tensor, read: Callable[[], None]) -> None:
        super().__init__(layer)
        self.__dict__.update(_states=states, _read=read)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.__dict__["_read"]()
        return self.__dict__["_states"].to(hidden_states.device)


def _path_to_layers(target: Any) -> tuple[str, ...]:
    """Returns the names of the modules on the way to the list of decoder layers; none if it cannot be told."""
    count = decoder_layers(text_config(target))
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    start = next((name for name, module in target.named_modules() if module is decoder), "")
    found = [
        name
        for name, module in target.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and f"{name}.".startswith(f"{start}." * bool(start))
    ]
    return tuple(found[0].split(".")) if len(found) == 1 else ()


def _layers(target: Any, path: Sequence[str]) -> list[nn.Module]:
    module = target
    for name in path:
        module = getattr(module, name)
    return list(module) if path else []


def _with_layers(target: Any, path: Sequence[str], layers: Sequence[nn.Module]) -> Any:
    """Returns a copy of a model with another list of layers. Modules on the way to it are copied, others shared."""
    top = module = _sharing(target)
    for name in path[:-1]:
        module._modules[name] = _sharing(module._modules[name])
        module = module._modules[name]
    module._modules[path[-1]] = nn.ModuleList(layers)
    return top


def _sharing(module: Any) -> Any:
    """Returns a copy of a module that has the same parts, of which some may be replaced."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    return copy
