"""The trunk of a drafter: the same code for training, single sequences, batches and compiled roll-outs.

It holds neither parameters nor keys. The caller passes *products* (modules in training, packed and 8-bit weights in
decoding) and a *context*, which keeps keys and values.

Letters in the shapes: T pairs that are read, S chains that start at some of them, K draft steps, P positions held, D
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ...core.tensors import Attend, Transform, shared_attention

Rope = tuple[torch.Tensor, torch.Tensor]  # see `rotary_embedding`


class Context(Protocol):
    """Keys and values, and attention masks; `starts`, an index `[S]` or a slice, are the pairs where chains start."""

    starts: Any

    def reading(self) -> Attend:
        """Attention of the pairs that are read."""

    def rolling(self, step: int, chains: int) -> Attend:
        """Attention of the first `chains`, `step` positions after their starts."""


@dataclass(frozen=True)
class LayerProducts:
    """A pre-norm transformer layer with SwiGLU; q, k and v are fused, and gate and up too."""

    input_norm: Transform
    qkv: Transform
    output: Transform
    mlp_norm: Transform
    gate_up: Transform
    down: Transform
    heads: int
    kv_heads: int

    def __call__(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Maps `[n, D]` to `[n, D]`; with `rows`, to these rows only, `[R, D]`."""
        rotated = self.heads + self.kv_heads
        states = self.qkv(self.input_norm(x)).view(len(x), rotated + self.kv_heads, -1)
        turned, values = states.split([rotated, self.kv_heads], dim=1)
        queries, keys = rotate(turned, rope).split([self.heads, self.kv_heads], dim=1)
        if rows is not None:
            x, queries = x[rows], queries[rows]
        x = x + self.output(attend(queries, keys.transpose(0, 1), values.transpose(0, 1), rows))
        gate, value = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


Layer = Callable[..., torch.Tensor]  # a `LayerProducts`, or a module with the same call


@dataclass(frozen=True)
class StepProducts:
    """Products of a roll-out step (PRISM, a processing module).

    `norm` and `project` map the previous drafted state to the input. Each layer reads and extends the keys and values
    of one of the trunk's last layers.
    """

    norm: Transform
    project: Transform
    layers: Sequence[Layer]


@dataclass(frozen=True)
class Trunk:
    """The parts of a trunk."""

    # From taps `[T, taps * D]` and embeddings `[T, D]` to inputs `[T, D]`
    fuse_inputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    layers: Sequence[Layer]  # read accepted positions
    steps: Sequence[StepProducts]  # products of the roll-out steps; the last one serves all further steps
    frequencies: torch.Tensor  # `[head_dim / 2]`, float32, of the rotary embedding

    def step(self, number: int) -> StepProducts:
        """The products of the step `number` (1 or more) after g_0."""
        return self.steps[min(number, len(self.steps)) - 1]


def read(
    trunk: Trunk, taps: torch.Tensor, embeds: torch.Tensor, position_ids: torch.Tensor, context: Context, ahead: int
) -> tuple[torch.Tensor, list[Rope]]:
    """Reads positions `[T, ...]` into the context; returns g_0 of each chain, `[S, D]`, and ropes of `ahead` steps."""
    count, x = len(position_ids), trunk.fuse_inputs(taps, embeds)
    starts = position_ids[context.starts]
    further = starts + torch.arange(1, ahead + 1, device=starts.device)[:, None]
    cos, sin = rotary_embedding(torch.cat([position_ids, further.flatten()]), trunk.frequencies, x.dtype)
    x = _through(trunk.layers, x, (cos[:count], sin[:count]), context.reading(), rows=context.starts)
    ropes = zip(cos[count:].split(len(starts)), sin[count:].split(len(starts)), strict=True) if ahead else ()
    return x, list(ropes)


def roll(
    trunk: Trunk, x: torch.Tensor, ropes: Sequence[Rope], context: Context, chains: int | None = None
) -> list[torch.Tensor]:
    """Rolls the first `chains` (None for all) from g_0 `[S, D]` without tokens: g_0 .. g_{K-1}."""
    states = [x]
    if chains is not None:
        x, ropes = x[:chains], [(cos[:chains], sin[:chains]) for cos, sin in ropes]
    for number, rope in enumerate(ropes, 1):
        step = trunk.step(number)
        first = len(trunk.layers) - len(step.layers)
        x = _through(step.layers, step.project(step.norm(x)), rope, context.rolling(number, len(x)), first)
        states.append(x)
    return states


def _through(
    layers: Sequence[Layer], x: torch.Tensor, rope: Rope, attend: Attend, first: int = 0, rows: Any = None
) -> torch.Tensor:
    """Runs layers on `[n, D]`, the last one for `rows` only; `first` is the first layer's index of keys and values."""
    for index, layer in enumerate(layers, 1):
        x = layer(x, rope, partial(attend, first + index - 1), rows if index == len(layers) else None)
    return x


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """`[head_dim / 2]`, float32."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def rotary_embedding(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Rope:
    """Cosines and sines `[n, 1, head_dim]` of integer `positions` `[n]`; the sines' first half is negative."""
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _moved(held: torch.Tensor, capacity: int) -> torch.Tensor:
    room = held.new_empty(held.shape[0], capacity, held.shape[2])
    room[:, : held.shape[1]] = held
    return room


class GrowingText:
    """A single sequence in growing buffers; rolled positions follow the `length` ones read, until more are read."""

    starts = slice(-1, None)

    def __init__(
        self,
        layers: int,
        like: torch.Tensor,  # empty keys of a layer, `[kv_heads, 0, head_dim]`
        window: int | None,  # attended positions including the position itself; None for all
        spare: int = 128,  # positions by which buffers grow, plus a quarter of the positions read
        mask_rows: int = 256,  # rows per mask
    ) -> None:
        self.keys, self.values, self.window = [like] * layers, [like] * layers, window
        self._spare, self._mask_rows, self.length = spare, mask_rows, 0

    def extend(self, count: int, ahead: int) -> None:
        """Makes room for reading `count` positions and rolling `ahead` steps; forgets what no window shows any more."""
        needed = self.length + count + ahead
        if self.keys[0].shape[1] < needed:
            first = 0 if self.window is None else max(self.length - 2 * self.window, 0)  # as many may be dropped again
            held = slice(first, self.length)
            capacity = needed - first + self._spare + (self.length - first) // 4
            self.keys, self.values = ([_moved(old[:, held], capacity) for old in s] for s in (self.keys, self.values))
            self.length -= first
        self.length += count

    def reading(self) -> Attend:
        return partial(self._attend, self.length)

    def rolling(self, step: int, chains: int) -> Attend:
        return partial(self._attend, self.length + step)

    def _attend(
        self, end: int, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        """Stores keys and values of the last positions up to `end`, which the queries belong to."""
        begin = end - keys.shape[1]
        self.keys[layer][:, begin:end], self.values[layer][:, begin:end] = keys, values
        return self._mixed(layer, queries, end)

    def _mixed(self, layer: int, queries: torch.Tensor, end: int) -> torch.Tensor:
        rows, window = len(queries), self.window or end
        masked = rows > 1 and (end > rows or rows > window)
        most = self._mask_rows
        if masked and rows > most:
            ends = range(end - rows + most, end + most, most)
            blocks = zip(queries.split(most), ends, strict=True)
            return torch.cat([self._mixed(layer, block, min(block_end, end)) for block, block_end in blocks])
        begin = max(end - rows + 1 - window, 0)  # first column that the first row sees
        keys, values = self.keys[layer][:, begin:end], self.values[layer][:, begin:end]
        if rows == 1:
            return shared_attention(queries, keys, values)
        if masked:
            first = end - begin - rows  # column of the first row's position
            seen = torch.ones(rows, end - begin, dtype=torch.bool, device=queries.device)
            return shared_attention(queries, keys, values, seen.tril(first).triu(first + 1 - window))
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(rows, -1)
