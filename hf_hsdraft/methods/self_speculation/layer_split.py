"""Splits a target's decoder into its first layers and the rest.

Each part is a copy of the target with some layers replaced, sharing everything else. The target is never written to,
so other calls may run it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...runtime.target_parts import InPlaceOf, decoder_list, why_not_replaced, with_modules


def why_not_split(target: Any) -> str:
    """Returns why a target's layers cannot be split; empty if they can."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    try:
        return why_not_replaced(target, [decoder_list(target)[0]])
    except ValueError as error:
        return str(error)


def weights_of_a_layer(target: Any) -> int:
    """Returns the mean number of weights of a decoder layer; 0 if the layers cannot be found."""
    try:
        _, layers = decoder_list(target)
    except ValueError:
        return 0
    return sum(weight.numel() for layer in layers for weight in layer.parameters()) // max(len(layers), 1)


class LayerSplit:
    """A target's decoder layers in two parts, the first `count` and the rest; see `why_not_split`."""

    def __init__(self, target: Any, count: int) -> None:
        self._target, self._count = target, count
        name, layers = decoder_list(target)
        self._name, self._layers = name, list(layers)
        self._others: int | None = None  # see `_Reached`
        last = self._layers[count - 1]

        def reach(*args: Any, **kwargs: Any) -> Any:
            found = last(*args, **kwargs)
            states, others = (found[0], len(found) - 1) if isinstance(found, tuple) and found else (found, None)
            if not isinstance(states, torch.Tensor):
                raise ValueError(f"{type(last).__name__} returns no hidden states")
            raise _Reached(states, others)

        self._first = with_modules(target, {name: nn.ModuleList([*self._layers[: count - 1], InPlaceOf(last, reach)])})

    def first_states(self, run: Callable[[Any], Any]) -> torch.Tensor:
        """Returns the hidden states after the first layers; nothing else is computed.

        `run` runs the forward of the model that it is given.
        """
        try:
            run(self._first)
        except _Reached as reached:
            self._others = reached.others
            return reached.states
        raise ValueError(f"{type(self._target).__name__} did not run layer {self._count} of its decoder")

    def model_after(self, states: torch.Tensor, read: Callable[[], None]) -> Any:
        """Returns a model that computes the other layers after states `[B, n, D]` of `first_states`.

        `read` is called in place of the first layers, which would write into the cache.
        """
        others = self._others

        def pass_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states if others is None else (hidden_states, *[None] * others)

        def continue_from(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            read()
            return pass_on(states.to(hidden_states.device))

        runs = [pass_on] * (self._count - 1) + [continue_from]
        first = [InPlaceOf(layer, run) for layer, run in zip(self._layers, runs, strict=False)]
        return with_modules(self._target, {self._name: nn.ModuleList([*first, *self._layers[self._count :]])})


class _Reached(Exception):
    """Raised when the last wanted layer has been computed, with its hidden states `[B, n, D]`.

    `others` is the number of values that it returns after them, such as attentions; None if it returns no tuple.
    """

    def __init__(self, states: torch.Tensor, others: int | None) -> None:
        super().__init__()
        self.states, self.others = states, others
