"""Nodes that a drafter reads one depth after the other, among the keys and values of accepted positions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...core.draft_tree import Expansion
from ...core.tensors import batched_attention, on_device
from ...core.tuning import MASK_ROWS
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.protocol import Ask
from .context import ContextSession, RowContext, Slots
from .decoder_layer import AttendByLayer


class DraftedNodes:
    """Nodes drafted in one round, after the accepted positions of some rows of the batch, which have been read.

    Drafted keys and values are overwritten when more positions are accepted. Number 0 is what the text ends with. Of
    a `LevelExpansion` these are the `Levels`, where a node's state is its number.
    """

    def __init__(self, context: RowContext, rows: Sequence[int], device: torch.device) -> None:
        self._context, self._rows = context, list(rows)
        self._above = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=device)  # `[B, 1 + m, m]`, ancestors

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if states is None:
            return self.of_roots(), torch.zeros_like(tokens)[..., None]
        logits, numbers = self.of_nodes(level, tokens, states[..., 0])
        return logits, numbers[..., None]

    def of_roots(self) -> torch.Tensor:
        """Returns logits `[B, 1, V']` of the roots' children."""
        raise NotImplementedError

    def of_nodes(self, level: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds nodes; returns the logits `[B, n, V']` of their children, at depth `level`, and their numbers."""
        raise NotImplementedError

    def add(self, parents: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Adds nodes below `parents` `[B, n]`, int64, and returns their numbers, likewise.

        With `causal`, each also sees the earlier nodes of this call.
        """
        (batch, count), before = parents.shape, self._above.shape[2]
        above = self._above.gather(1, parents[..., None].expand(-1, -1, before))
        own = torch.ones(count, count, dtype=torch.bool, device=parents.device)
        own = own.tril() if causal else own.tril().triu()
        self._added = torch.cat([above, own.expand(batch, -1, -1)], dim=2)  # `[B, n, m]`
        self._above = torch.cat([F.pad(self._above, (0, count)), self._added], dim=1)
        self._slots = self._context.drafted(self._rows, before, count)
        return torch.arange(before + 1, before + 1 + count, device=parents.device).expand(batch, -1)

    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values `[B, n, kv_heads, head_dim]` of the last added, and returns all of the layer."""
        self._context.write(layer, self._slots, keys.flatten(0, 1), values.flatten(0, 1))
        return self._context.view(layer, self._rows, self._added.shape[2])

    def seen(
        self, last: torch.Tensor, window: int | torch.Tensor | None, there: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the mask `[B, n, P]` of the last added; `there` `[m]` marks those that a layer has."""
        count, drafted = self._added.shape[1:]
        accepted = self._context.seen(self._rows, last, window, drafted)
        assert accepted is not None
        places = self._context.drafted_slots(self._rows, 0, drafted)[:, None].expand(-1, count, -1)
        ancestors = self._added if there is None else self._added & there
        return accepted.expand(-1, count, -1).scatter(2, places, ancestors)


def reading_attention(
    context: RowContext,
    slots: Slots,
    counts: Mapping[int, int],  # each row's positions, row by row
    positions: torch.Tensor,  # `[n]`
    windows: Sequence[int | None],  # of each layer
) -> AttendByLayer:
    """Returns the attention of positions that are read and stored in `slots`: each sees its row up to itself.

    If queries are those of some rows only, these must be the last position of each row of the batch.
    """
    rows = list(counts)

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ends: Any) -> torch.Tensor:
        context.write(layer, slots, keys, values)
        if ends is not None:
            seen = context.seen(rows, positions[ends][:, None], windows[layer])
            return batched_attention(queries[:, None], *context.view(layer, rows), seen)[:, 0]
        mixed = []
        texts = zip(rows, queries.split(list(counts.values())), positions.split(list(counts.values())), strict=True)
        for row, own, at in texts:
            view = context.view(layer, [row])
            # A mask of a whole prompt would grow quadratically.
            for block, last in zip(own.split(MASK_ROWS), at.split(MASK_ROWS), strict=True):
                seen = context.seen([row], last[None], windows[layer])
                mixed.append(batched_attention(block[None], *view, seen)[0])
        return torch.cat(mixed)

    return attend


def ends_of(counts: Mapping[int, int], device: torch.device) -> torch.Tensor:
    """Returns the indices `[B]` of each row's last position."""
    return on_device(list(itertools.accumulate(counts.values())), device) - 1


class LevelSession(ContextSession):
    """Drafts trees (or chains) for a batch, one depth of all rows per forward, and forgets what was drafted."""

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        read = self._context
        self._context = copy.deepcopy(read)  # later rounds overwrite drafted positions
        try:
            return self.expansion(asks, expansion.depth, options)
        finally:
            self._context = read
