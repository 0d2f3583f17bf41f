"""The session of layers whose states cannot be told apart by node: each text, and each node of a depth, has a cache.

These layers convolve neighbouring positions (Inkling) or choose groups of keys by their slots (MiniMax-M3, GLM-5.3):
they run on transformers' caches, of which a branch of a draft continues a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.draft_tree import Expansion
from ...core.tuning import MASK_ROWS
from ..base.draft_options import DraftOptions
from ..base.protocol import Ask, Call
from ..base.reading_session import Columns, LevelSession, Slots
from ..base.target_weights import TargetWeights
from ..base.tree_session import DraftMemory, LevelExpansion
from .layers import MtpLayers, held_at


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


class CachedMtpSession(LevelSession):
    """Drafts trees (or chains), each row by itself. A column of x_p is queued with position p - 1."""

    def __init__(self, drafter: Any, layers: MtpLayers, call: Call) -> None:
        self._layers, self._used = layers, min(layers.count, call.options.depth)
        ids = torch.arange(layers.vocab_size, device=layers.device)
        super().__init__(drafter, TargetWeights(layers.embed, None, ids), call, 0)
        self.kind = (layers.count, self._used, layers.dtype, layers.device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        for row, *parts in zip(counts, *(each.split(list(counts.values())) for each in columns), strict=True):
            if row not in self._left:
                none = parts[0].new_zeros(self._used, parts[0].shape[-1])
                self._left[row] = _Text(self._layers.new_cache(), none)
            # A mask of a whole prompt would grow quadratically.
            for taps, embeds, positions in zip(*(part.split(MASK_ROWS) for part in parts), strict=True):
                self._left[row].read(self._layers, taps, embeds, positions + 1)

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        rows = [ask.row for ask in asks]
        self.read_pending(rows)
        drafted = _DraftedCopies(self._layers, [self._left[row] for row in rows], self.anchors(rows), depth)
        return LevelExpansion(drafted, depth, options.temperature, self.race(rows, depth))

    def saved(self) -> Any:
        return copy.deepcopy(super().saved())

    def restore(self, saved: Any) -> None:
        super().restore(copy.deepcopy(saved))

    def memory(self, length: int) -> DraftMemory | None:
        return super().memory(length) if 0 in self._left else None

    def resume(self, memory: Any, cached: int) -> None:
        fits = isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1)
        if fits and len(memory.context[1].outputs) == self._used:
            super().resume(memory, cached)
