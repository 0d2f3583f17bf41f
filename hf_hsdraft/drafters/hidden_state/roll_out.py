"""The trunk of a drafter as decoding runs it on one text: the same network, with fewer and larger operations.

[`HSDraftNetwork.forward`] serves training, where many chains share a context, and batches. A single text needs none of
its masks. So its products are those of [`WorkingWeights`], the context grows in place, and drafted positions stand
behind it for as long as they last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .configuration_hsdraft import HSDraftConfig
from .network import DraftContext, Rope, rotary_embedding, rotary_frequencies, rotate
from .working_weights import LayerWeights, WorkingWeights

_SPARE_POSITIONS, _SPARE_SHARE = 128, 4  # room for so many positions more, and for this part of those there are


@dataclass
class Layer:
    """One trunk layer and what it holds of the text.

    Attributes:
        heads: of the queries; kv_heads: of keys and values.
        window: positions that are attended to, the own one included; `None` for all.
        keys, values: `[kv_heads, capacity, head_dim]`.
    """

    weights: LayerWeights
    heads: int
    kv_heads: int
    window: int | None
    keys: torch.Tensor
    values: torch.Tensor

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
        end = place + len(x)
        queries, keys, values = self.projected(x, rope)
        self.keys[:, place:end], self.values[:, place:end] = keys, values
        rows = slice(len(x) - 1, None) if last_only else slice(None)
        return self.output(x[rows], self._mixed(queries[rows], place, end))

    def projected(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[n, heads, head_dim]`, and keys and values `[kv_heads, n, head_dim]`."""
        heads, kv_heads = self.heads, self.kv_heads
        states = self.weights.qkv(self.weights.input_norm(x)).view(len(x), heads + 2 * kv_heads, -1)
        rotated = rotate(states[:, : heads + kv_heads], (rope[0][:, None], rope[1][:, None]))
        values = states[:, heads + kv_heads :]
        return rotated[:, :heads], rotated[:, heads:].transpose(0, 1), values.transpose(0, 1)

    def output(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Of inputs `[n, D]` and what attention made of them, `[n, heads * head_dim]`."""
        weights = self.weights
        x = x + weights.output(mixed)
        gate, value = weights.gate_up(weights.mlp_norm(x)).chunk(2, dim=-1)
        return x + weights.down(F.silu(gate) * value)

    def _mixed(self, queries: torch.Tensor, place: int, end: int) -> torch.Tensor:
        """Attention of `queries` `[n, heads, head_dim]`, the last ones of the text up to `end`."""
        rows, window = len(queries), self.window or end
        begin = max(end - rows + 1 - window, 0)  # of what the first row sees
        keys, values = self.keys[None, :, begin:end], self.values[None, :, begin:end]
        if rows == 1:  # the heads of a group stand where queries do: no key is read twice
            grouped = queries.view(1, self.kv_heads, self.heads // self.kv_heads, -1)
            mixed = F.scaled_dot_product_attention(grouped, keys, values)
        else:
            mask = None
            if place or rows > window:
                seen = torch.ones(rows, end - begin, dtype=torch.bool, device=queries.device)
                first = end - begin - rows  # column of the first row's own position
                mask = seen.tril(first).triu(first + 1 - window)
            mixed = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys, values, mask, is_causal=mask is None, enable_gqa=True
            )
            mixed = mixed.transpose(1, 2)
        return mixed.reshape(rows, -1)


class RollOut:
    """The trunk's state on one text.

    Args:
        weights, config, device, dtype: of the drafter.
    """

    def __init__(
        self, weights: WorkingWeights, config: HSDraftConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._weights, self._frequencies = weights, rotary_frequencies(config, device)
        room = torch.empty(config.num_key_value_heads, 0, config.head_dim, device=device, dtype=dtype)
        heads = config.num_attention_heads, config.num_key_value_heads
        window = config.sliding_window
        self._layers = [Layer(layer, *heads, window, room, room) for layer in weights.layers]
        self._length = 0
        # Positions that decide on the output at the last one, and on what is drafted after it.
        self._reach = None if window is None else len(self._layers) * (window - 1) + 1

    @property
    def context(self) -> DraftContext:
        """A copy of what has been read, as far back as it matters."""
        held = slice(max(self._length - (self._reach or self._length), 0), self._length)
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
            taps, embeds, position_ids: as [`HSDraftNetwork.forward`] takes them, of one text, in order.
            num_draft_steps: K.
        """
        weights = self._weights
        x, (cos, sin) = self.read(taps, embeds, position_ids, ahead=max(num_draft_steps - 1, 0))
        states = [x]
        for step in range(num_draft_steps - 1):
            x = weights.roll(weights.roll_norm(x))
            rope = cos[step, None], sin[step, None]
            for layer in self._layers:
                x = layer(x, rope, self._length + step, last_only=True)
            states.append(x)
        return torch.cat(states[:num_draft_steps])

    def read(
        self, taps: torch.Tensor, embeds: torch.Tensor, position_ids: torch.Tensor, ahead: int
    ) -> tuple[torch.Tensor, Rope]:
        """Reads accepted positions: the output at the last one, `[1, D]`, and the rotary embedding of `ahead` more."""
        if self._reach is not None and len(taps) >= self._reach:  # nothing before these matters any more
            taps, embeds, position_ids = (column[-self._reach :] for column in (taps, embeds, position_ids))
            self._length = 0
        count = len(taps)
        x = self._weights.fuse_inputs(taps, embeds)
        further = position_ids[-1:] + torch.arange(1, ahead + 1, device=position_ids.device)
        positions = torch.cat([position_ids, further])
        cos, sin = rotary_embedding(positions, self._frequencies, x.dtype)
        for index, layer in enumerate(self._layers):
            layer.reserve(self._length, len(positions))
            final = index == len(self._layers) - 1
            x = layer(x, (cos[:count], sin[:count]), self._length, last_only=final)
        self._length += count
        return x, (cos[count:], sin[count:])
