"""Steering of a small language model by its target's hidden states ("Steering Pretrained Drafters", SD^2, section 3).

The target's hidden states at the last verified position make a vector, which enters every feed-forward block of the
drafter: down(act(gate x) * (up x + delta)), with one delta per layer. A new steering changes nothing, since its last
product is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...drafters.base.travelling_config import default_tap_layers
from ...drafters.language_model.layer_subset import layers_of, sharing_weights
from ...runtime.target_limits import decoder_layers, text_config

_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SteeringSizes:
    """Sizes of a steering, and what it reads."""

    taps: tuple[int, ...]  # the target's hidden states to read, ascending (0: the embeddings, i: after layer i)
    target_hidden_size: int  # D, their width
    inner_sizes: tuple[int, ...]  # width of each drafter layer's feed-forward block

    @classmethod
    def of(cls, model: Any, target: Any, taps: Sequence[int] | None = None) -> SteeringSizes:
        """Returns the sizes for a drafter's language model and its target.

        `taps` defaults to one low, one middle and one high hidden state. Raises a ValueError if the drafter has no
        gated feed-forward blocks, or the target no such hidden states.
        """
        config = text_config(target)
        layers = decoder_layers(config)
        wanted = default_tap_layers(layers) if taps is None else list(taps)
        if not wanted or wanted != sorted(set(wanted)) or not (wanted[0] >= 0 and wanted[-1] <= layers):
            raise ValueError(f"taps {wanted} are invalid: expected ascending numbers from 0 to {layers}, each once")
        inner = tuple(up.out_features for up in up_projections(model))
        return cls(tuple(wanted), config.hidden_size, inner)


def up_projections(model: Any) -> list[nn.Linear]:
    """Returns the product of each layer's gated feed-forward block that a delta is added to.

    Raises a ValueError if a layer has no such block, or several.
    """
    found = []
    for number, layer in enumerate(layers_of(model)[1]):
        blocks = [part for part in layer.modules() if all(hasattr(part, name) for name in _GATED)]
        if len(blocks) != 1 or not isinstance(blocks[0].up_proj, nn.Linear):
            raise ValueError(
                f"{type(model).__name__} cannot be steered: layer {number} has {len(blocks)} gated feed-forward blocks "
                f"({', '.join(_GATED)}), expected one, as models like Llama have"
            )
        found.append(blocks[0].up_proj)
    return found


class Steering(nn.Module):
    """Maps hidden states of the target to what is added in each layer of the drafter.

    Letters in the shapes: D width of the target, F sum of the widths of the drafter's feed-forward blocks.
    """

    def __init__(self, sizes: SteeringSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, count = sizes.target_hidden_size, len(sizes.taps)
        self.fuse = nn.Linear(count * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, sum(sizes.inner_sizes), bias=False)
        with torch.no_grad():
            self.fuse.weight.copy_(torch.eye(width, device=self.fuse.weight.device).repeat(1, count))
            nn.init.zeros_(self.up.weight)
        self._key = _Key()

    def vectors(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns vectors `[..., D]` of taps `[..., taps * D]`. A zero vector stands for unknown taps."""
        return self.norm(self.fuse(taps.to(self.fuse.weight.device)))

    def deltas(self, vectors: torch.Tensor) -> torch.Tensor:
        """Returns what vectors `[..., D]` add in all layers, side by side, `[..., F]`; zeros for a zero vector."""
        return self.up(vectors)

    def attached(self, model: Any) -> Any:
        """Returns a language model that shares the weights and can be steered; unsteered, it computes the same.

        Raises a ValueError if its feed-forward blocks have other sizes than the steering.
        """
        steered = sharing_weights(model)
        products = up_projections(steered)
        found = tuple(up.out_features for up in products)
        if found != self.sizes.inner_sizes:
            raise ValueError(
                f"the steering is for feed-forward blocks of {list(self.sizes.inner_sizes)}, the language model has "
                f"{list(found)}: expected the model that it was trained with"
            )
        start = 0
        for up in products:
            up.register_forward_hook(functools.partial(_add, self._key, start))
            start += up.out_features
        return steered

    @contextmanager
    def applied(self, deltas: torch.Tensor) -> Iterator[None]:
        """Steers the forwards of this thread inside the context.

        `deltas` are `[B, n, F]`, one per token read; n may be 1 for all tokens of a text.
        """
        token = _current.set((self._key, deltas))
        try:
            yield
        finally:
            _current.reset(token)


class _Key:
    """Identifies a steering, so that hooks need not hold the steering itself."""


_current: ContextVar[tuple[_Key, torch.Tensor] | None] = ContextVar("deltas of the running forward", default=None)


def _add(key: _Key, start: int, up: nn.Linear, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    """Forward hook: adds the layer's part of the running forward's deltas."""
    current = _current.get()
    if current is None or current[0] is not key:
        return None
    return output + current[1][..., start : start + up.out_features].to(output)
