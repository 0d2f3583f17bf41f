"""The output of a target's last layer before the final norm, which transformers does not return.

It has the index after that of the normed one: L + 1 for a target with L layers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..core.refusals import DraftingRefused
from .target_limits import decoder_layers, text_config

_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "layer_norm")


def final_norm(target: Any) -> nn.Module | None:
    """The norm after the last layer; `None` where a target has none by a usual name."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    found = (getattr(decoder, name, None) for name in _NAMES)
    return next((each for each in found if isinstance(each, nn.Module)), None)


def before_norm(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """Returns indices into the hidden states of a target with so many layers, the last one before its norm."""
    return tuple(tap + 1 if tap == layers else tap for tap in taps)


def check_last_state(target: Any) -> None:
    """Raises a DraftingRefused if the last layer's output before the norm cannot be had."""
    if final_norm(target) is None:
        raise DraftingRefused(
            "the drafter reads the output of the last layer before the target's final norm, and a "
            f"{type(target).__name__} has none by a name that is known here. Use a drafter that reads lower layers "
            "only."
        )


class LastState:
    """Keeps the last layer's output of the last forward, if it is tapped.

    Args:
        target: the model being decoded.
        tap_layers: indices into its hidden states.

    Attributes:
        asked: those that transformers returns.
    """

    def __init__(self, target: Any, tap_layers: Sequence[int]) -> None:
        layers = decoder_layers(text_config(target)) if tap_layers else 0
        self.asked = [tap for tap in tap_layers if tap <= layers]
        self._norm = final_norm(target) if len(self.asked) < len(tap_layers) else None
        self._layers, self._state = layers, torch.empty(0)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While a forward runs: keeps what the norm is given in this thread."""
        if self._norm is None:
            yield
            return
        thread = threading.get_ident()

        def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if threading.get_ident() == thread:  # others may decode with the same target
                self._state = inputs[0].detach()

        hook = self._norm.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def behind(self, states: Any) -> Any:
        """Returns the hidden states of a forward, and behind them the kept one."""
        if self._norm is None:
            return states
        return (*(states or (None,) * (self._layers + 1)), self._state)
