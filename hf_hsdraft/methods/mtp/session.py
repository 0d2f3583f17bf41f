"""Sessions of layers for multi-token prediction: by nodes in one store, or by a cache of each text and node."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ...core.draft_tree import Expansion
from ...core.tensors import on_device
from ...core.tuning import MASK_ROWS
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.protocol import Ask, Call
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.tree_session import Columns, DraftMemory
from ..published.context import RowContext, Slots
from ..published.levels import LevelExpansion, Levels
from ..published.nodes import DraftedNodes, LevelSession
from .layers import MtpLayers, held_at


class DraftedColumns(DraftedNodes):
    """Columns of nodes drafted in one round, and of the roots, which have number 0.

    The target has not read the tokens before a node of depth m, so its column begins with layer m, which predicts its
    children. Deeper than there are layers, they are used again in turn, one for each depth.

    Args:
        outputs: `[B, L, D]`, outputs of the roots' columns.
        roots: `[B, 1]`, int64, their positions.
        begins: `[B, 1]`, int64, the first position read of each text.
        depth: greatest depth of a node's child.
    """

    def __init__(
        self,
        layers: MtpLayers,
        context: RowContext,
        rows: Sequence[int],
        outputs: torch.Tensor,
        roots: torch.Tensor,
        begins: torch.Tensor,
        depth: int,
    ) -> None:
        super().__init__(context, rows, outputs.device)
        self._layers, self._depth, self._roots, self._begins = layers, depth, roots, begins
        self._used = outputs.shape[1]
        self._outputs = list(outputs.split(1, dim=1))  # by layer, `[B, 1 + m, D]`; zeros where a column lacks it
        self._held: list[tuple[range, int]] = []  # layers in the columns of each depth, and number of these columns

    def of_roots(self) -> torch.Tensor:
        return self._layers.logits(self._outputs[0][:, :1], 0)

    def of_nodes(self, level: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (batch, count), depth, numbers = tokens.shape, level - 1, self.add(parents)
        held = held_at(depth, self._used, self._depth)
        self._held.append((held, count))
        embeds, positions = self._layers.embed(tokens), (self._roots + depth).expand(-1, count)

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.written(layer, keys.transpose(1, 2), values.transpose(1, 2))

        below = self._outputs[(depth - 1) % self._used]
        made = []
        for layer in held:
            states = below.gather(1, parents[..., None].expand(-1, -1, below.shape[-1]))
            near = _near(self._layers.windows[layer], self._roots - 1, self._begins + layer, depth)
            there = torch.cat([tokens.new_full((size,), layer in layers) for layers, size in self._held]).bool()
            mask = self.seen(self._roots - 1, near, there)
            made.append(self._layers.run(layer, embeds, states, positions, mask, write))
            below = self._outputs[layer]
        for layer, outputs in enumerate(self._outputs):
            added = made[layer - held.start] if layer in held else outputs.new_zeros(batch, count, outputs.shape[-1])
            self._outputs[layer] = torch.cat([outputs, added], dim=1)
        return self._layers.logits(made[0], held.start), numbers


class _Columns(NamedTuple):
    """What a text's last column leaves."""

    outputs: torch.Tensor  # `[L, D]`; zeros where it lacks a layer
    first: torch.Tensor  # `[1]`, the first position read


class _LayersSession(LevelSession):
    """Drafts trees (or chains) by the layers. A column of x_p is queued with position p - 1."""

    def __init__(self, drafter: Any, layers: MtpLayers, call: Call, stored: int) -> None:
        self._layers, self._used = layers, min(layers.count, call.options.depth)
        ids = torch.arange(layers.vocab_size, device=layers.device)
        super().__init__(drafter, TargetWeights(layers.embed, None, ids), call, stored)
        self.kind = (layers.count, self._used, layers.dtype, layers.device)

    def levels(self, rows: Sequence[int], depth: int) -> Levels:
        """Returns the levels of a draft of rows whose columns have been read."""
        raise NotImplementedError

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        rows = [ask.row for ask in asks]
        self.read_pending(rows)
        return LevelExpansion(self.levels(rows, depth), depth, options.temperature, self.race(rows, depth))

    def memory(self, length: int) -> DraftMemory | None:
        return super().memory(length) if 0 in self._left else None

    def resume(self, memory: Any, cached: int) -> None:
        fits = isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1)
        if fits and len(memory.context[1].outputs) == self._used:
            super().resume(memory, cached)


class MtpSession(_LayersSession):
    """Drafts a depth of all rows per forward."""

    def __init__(self, drafter: Any, layers: MtpLayers, call: Call) -> None:
        super().__init__(drafter, layers, call, layers.num_stored)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        every, block = [column.split(list(counts.values())) for column in (*columns, slots.slots)], MASK_ROWS
        for start in range(0, max(counts.values()), block):  # a mask of a whole prompt would grow quadratically
            rows = [row for row, count in counts.items() if count > start]
            places = [place for place, count in enumerate(counts.values()) if count > start]
            parts = [[column[place][start : start + block] for place in places] for column in every]
            self._read(rows, *parts)

    def _read(
        self,
        rows: Sequence[int],
        taps: list[torch.Tensor],
        embeds: list[torch.Tensor],
        positions: list[torch.Tensor],
        slots: list[torch.Tensor],
    ) -> None:
        """Reads columns of rows, padded; keeps outputs `[L, D]` of the last, and first position `[1]`, of each."""
        device, lengths = self._layers.device, [len(each) for each in positions]
        width, known = max(lengths), [self._left.get(row) for row in rows]
        real = torch.arange(width, device=device) < on_device(lengths, device)[:, None]
        at = torch.stack([torch.cat([each, each[-1:].expand(width - len(each))]) for each in positions])
        texts = on_device(list(rows), device).repeat_interleave(on_device(lengths, device))
        places, context = Slots(texts, torch.cat(slots)), self._context

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            context.write(layer, places, *(each.transpose(1, 2)[real] for each in (keys, values)))
            return context.view(layer, rows)

        below, tokens = pad_sequence(taps, batch_first=True), pad_sequence(embeds, batch_first=True)
        firsts = [each[:1] if left is None else left.first for left, each in zip(known, positions, strict=True)]
        begins, ends = torch.stack(firsts), on_device(lengths, device) - 1
        none = below.new_zeros(self._used, below.shape[-1])
        last = [none if left is None else left.outputs for left in known]
        kept = []
        for layer in range(self._used):
            seen = context.seen(rows, at, _near(self._layers.windows[layer], at, begins + layer))
            made = self._layers.run(layer, tokens, below, at + 1, seen, write)
            kept.append(made[torch.arange(len(rows), device=device), ends])
            below = torch.cat([torch.stack([each[layer : layer + 1] for each in last]), made[:, :-1]], dim=1)
        self._left.update(zip(rows, map(_Columns, torch.stack(kept, dim=1), firsts), strict=True))

    def levels(self, rows: Sequence[int], depth: int) -> Levels:
        outputs, begins = (torch.stack(each) for each in zip(*(self._left[row] for row in rows), strict=True))
        return DraftedColumns(self._layers, self._context, rows, outputs, self.anchors(rows), begins, depth)


def _near(window: int | None, last: torch.Tensor, first: torch.Tensor, depth: int = 0) -> torch.Tensor:
    """Returns how many positions up to `last` a query may see, from `first` on; `depth` is its distance from `last`."""
    near = last - first + 1
    return near if window is None else near.clamp(max=window - depth)


@dataclass
class _Text:
    """What the layers have read of a text."""

    cache: Any
    outputs: torch.Tensor  # `[L, D]`, of the last column; zeros where it lacks a layer
    columns: int = 0

    def read(self, layers: MtpLayers, taps: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> None:
        """Reads further columns; layer k has none before the k-th of a text."""
        below, kept = taps, []
        for layer, last in enumerate(self.outputs):
            made, late = taps.new_zeros(taps.shape), max(layer - self.columns, 0)
            if late < len(taps):
                each = (embeds[None, late:], below[None, late:], positions[None, late:])
                made[late:] = layers.run_cached(layer, *each, self.cache)[0]
            kept.append(made[-1])
            below = torch.cat([last[None], made[:-1]])
        self.outputs, self.columns = torch.stack(kept), self.columns + len(taps)


class _DraftedCopies:
    """`Levels` of nodes drafted in one round, whose states are their places among the nodes of their depth.

    Which layers are in the column of a node, see `DraftedColumns`.
    """

    def __init__(self, layers: MtpLayers, texts: Sequence[_Text], roots: torch.Tensor, depth: int) -> None:
        self._layers, self._roots, self._depth = layers, roots, depth
        self._caches = [copy.deepcopy(text.cache) for text in texts]
        self._outputs = list(torch.stack([text.outputs for text in texts])[:, None].unbind(2))  # `[B, n, D]` by layer

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)[..., None]
        if states is None:
            return self._layers.logits(self._outputs[0], 0), places
        return self._of_nodes(level - 1, tokens, states[..., 0]), places

    def _of_nodes(self, depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        used, embeds = len(self._outputs), self._layers.embed(tokens)
        held = held_at(depth, used, self._depth)
        alone = parents.shape[1] == 1 and self._outputs[0].shape[1] == 1
        outputs = [each.gather(1, parents[..., None].expand(-1, -1, each.shape[-1])) for each in self._outputs]
        below, made = outputs[(depth - 1) % used], {}
        for row, cache in enumerate([] if alone else self._caches):
            cache.reorder_cache(parents[row])
        for layer in held:
            rows = zip(embeds, below, self._roots + depth, self._caches, strict=True)
            below = torch.stack(
                [
                    self._layers.run_cached(layer, own[:, None], state[:, None], at.expand(len(own), 1), cache)[:, 0]
                    for own, state, at, cache in rows
                ]
            )
            made[layer] = below
        self._outputs = [made.get(layer, torch.zeros_like(each)) for layer, each in enumerate(outputs)]
        return self._layers.logits(made[held.start], held.start)


class CachedMtpSession(_LayersSession):
    """Drafts each row by itself, by layers that run on transformers' caches: a branch of a draft continues a copy.

    The states of these layers cannot be told apart by node: they convolve neighbouring positions (Inkling), or choose
    groups of keys by their slots (MiniMax-M3, GLM-5.3).
    """

    def __init__(self, drafter: Any, layers: MtpLayers, call: Call) -> None:
        super().__init__(drafter, layers, call, 0)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        for row, *parts in zip(counts, *(each.split(list(counts.values())) for each in columns), strict=True):
            if row not in self._left:
                none = parts[0].new_zeros(self._used, parts[0].shape[-1])
                self._left[row] = _Text(self._layers.new_cache(), none)
            # A mask of a whole prompt would grow quadratically.
            for taps, embeds, positions in zip(*(part.split(MASK_ROWS) for part in parts), strict=True):
                self._left[row].read(self._layers, taps, embeds, positions + 1)

    def levels(self, rows: Sequence[int], depth: int) -> Levels:
        return _DraftedCopies(self._layers, [self._left[row] for row in rows], self.anchors(rows), depth)

    def saved(self) -> Any:
        return copy.deepcopy(super().saved())

    def restore(self, saved: Any) -> None:
        super().restore(copy.deepcopy(saved))
