"""The trunk of a drafter as decoding runs it on one text: the same network, with fewer and larger operations.

[`HSDrafter.forward`] serves training, where many chains share a context, and batches. A single text needs none of its
masks, and at its size every operation costs more to start than to run. So queries, keys and values are one product
here, the context grows in place, and drafted positions stand behind it for as long as they last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .modeling_hsdraft import DraftContext, HSDraftAttention, HSDrafter, HSDraftLayer, Rope, rotary_embedding, rotate

_SPARE_POSITIONS, _SPARE_SHARE = 128, 4  # room for so many positions more, and for this part of those there are


@dataclass
class _Layer:
    """One trunk layer, its products joined, and what it holds of the text.

    Attributes:
        attention_weight: `[q + k + v, D]`; mlp_weight: `[2 I, D]`, gate and up. `None` if the products are more than
            a weight each, as adapters make them.
        keys, values: `[kv_heads, capacity, head_dim]`.
    """

    layer: HSDraftLayer
    attention_weight: torch.Tensor | None
    mlp_weight: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, layer: HSDraftLayer) -> _Layer:
        attention, weight = layer.attention, layer.attention.q_proj.weight
        room = weight.new_empty(attention.kv_heads, 0, attention.head_dim)
        products = [attention.q_proj, attention.k_proj, attention.v_proj], [layer.gate_proj, layer.up_proj]
        return cls(layer, _joined(products[0]), _joined(products[1]), room, room)

    def reserve(self, held: int, more: int) -> None:
        """Makes room for `more` positions after the `held` ones."""
        if self.keys.shape[1] < held + more:
            capacity = held + more + _SPARE_POSITIONS + held // _SPARE_SHARE
            for name in ("keys", "values"):
                old = getattr(self, name)
                room = old.new_empty(old.shape[0], capacity, old.shape[2])
                room[:, :held] = old[:, :held]
                setattr(self, name, room)

    def __call__(self, x: torch.Tensor, rope: Rope, place: int, last_only: bool) -> torch.Tensor:
        """Reads `x` `[n, D]` at positions `place` .. `place + n - 1`; gives all outputs, or that of the last only."""
        layer, attention = self.layer, self.layer.attention
        end = place + len(x)
        hidden = layer.input_norm(x)
        if self.attention_weight is None:
            states = torch.cat([attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)], dim=-1)
        else:
            states = F.linear(hidden, self.attention_weight)
        states = states.view(len(x), -1, attention.head_dim)
        heads, kv_heads = attention.kv_heads * attention.groups, attention.kv_heads
        rotated = rotate(states[:, : heads + kv_heads], (rope[0][:, None], rope[1][:, None]))
        self.keys[:, place:end] = rotated[:, heads:].transpose(0, 1)
        self.values[:, place:end] = states[:, heads + kv_heads :].transpose(0, 1)
        rows = slice(len(x) - 1, None) if last_only else slice(None)
        x = x[rows] + self._mixed(rotated[rows, :heads], place, end, attention)
        hidden = layer.mlp_norm(x)
        if self.mlp_weight is None:
            gate, value = layer.gate_proj(hidden), layer.up_proj(hidden)
        else:
            gate, value = F.linear(hidden, self.mlp_weight).chunk(2, dim=-1)
        return x + layer.down_proj(F.silu(gate) * value)

    def _mixed(self, queries: torch.Tensor, place: int, end: int, attention: HSDraftAttention) -> torch.Tensor:
        """Attention of `queries` `[n, heads, head_dim]`, the last ones of the text up to `end`."""
        keys, values, rows = self.keys[None, :, :end], self.values[None, :, :end], len(queries)
        if rows == 1:  # the heads of a group stand where queries do: no key is read twice
            grouped = queries.view(1, attention.kv_heads, attention.groups, attention.head_dim)
            mixed = F.scaled_dot_product_attention(grouped, keys, values)
        else:
            mask = None
            if place:
                mask = torch.ones(rows, end, dtype=torch.bool, device=queries.device).tril(place)
            mixed = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys, values, mask, is_causal=mask is None, enable_gqa=True
            )
            mixed = mixed.transpose(1, 2)
        return attention.o_proj(mixed.reshape(rows, -1))


def _joined(products: Sequence[nn.Module]) -> torch.Tensor | None:
    """Their weights as one, if they are plain products."""
    if any(type(product) is not nn.Linear for product in products):
        return None
    return torch.cat([product.weight for product in products])  # type: ignore[misc]


class RollOut:
    """The trunk's state on one text.

    Args:
        drafter: weights and configuration; not changed.
    """

    def __init__(self, drafter: HSDrafter) -> None:
        self._drafter = drafter
        self._layers = [_Layer.of(layer) for layer in drafter.layers]  # type: ignore[arg-type]
        self._length = 0

    @property
    def context(self) -> DraftContext:
        """A copy of what has been read."""
        held = slice(0, self._length)
        return DraftContext([(layer.keys[:, held].clone(), layer.values[:, held].clone()) for layer in self._layers])

    def resume(self, context: DraftContext) -> None:
        """Goes on from what has been read before."""
        for layer, (keys, values) in zip(self._layers, context.layers, strict=True):
            layer.keys, layer.values = keys.clone(), values.clone()
        self._length = context.length

    def __call__(
        self, taps: torch.Tensor, embeds: torch.Tensor, position_ids: torch.Tensor, num_draft_steps: int
    ) -> torch.Tensor:
        """Reads accepted positions, then rolls on from the last: `[K, D]`, g_0 .. g_{K-1}; K may be 0.

        Args:
            taps, embeds, position_ids: as [`HSDrafter.forward`] takes them, of one text, in order.
            num_draft_steps: K.
        """
        drafter, count = self._drafter, len(taps)
        x, (cos, sin) = self.read(taps, embeds, position_ids, ahead=max(num_draft_steps - 1, 0))
        states = [x]
        for step in range(num_draft_steps - 1):
            x = drafter.roll_proj(drafter.roll_norm(x))
            rope = cos[count + step, None], sin[count + step, None]
            for layer in self._layers:
                x = layer(x, rope, self._length + step, last_only=True)
            states.append(x)
        return torch.cat(states[:num_draft_steps])

    def read(
        self, taps: torch.Tensor, embeds: torch.Tensor, position_ids: torch.Tensor, ahead: int
    ) -> tuple[torch.Tensor, Rope]:
        """Reads accepted positions: the output at the last one, `[1, D]`, and the rotary embedding of all and of
        `ahead` further ones."""
        config, count = self._drafter.config, len(taps)
        x = self._drafter.fuse_inputs(taps, embeds)
        further = position_ids[-1:] + torch.arange(1, ahead + 1, device=position_ids.device)
        positions = torch.cat([position_ids, further])
        cos, sin = rotary_embedding(positions, config.head_dim, config.rope_theta, x.dtype)
        for index, layer in enumerate(self._layers):
            layer.reserve(self._length, len(positions))
            final = index == len(self._layers) - 1
            x = layer(x, (cos[:count], sin[:count]), self._length, last_only=final)
        self._length += count
        return x, (cos, sin)
