"""Attention of packed sequences and of chains rolled from them, in the training of drafters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from ...core.tensors import Attend, shared_attention
from ...core.tuning import MASK_ROWS

# Number of entries of a mask from which on it is made in blocks, also on GPUs, where launching kernels for each
# block takes longer - by hand.
LARGE_MASK = 2**20
LARGE_MASK_GPU = 2**25


@dataclass(frozen=True)
class Sight:
    """What each row sees: earlier positions of its sequence and its own, within a window. Columns are the pairs."""

    rows: torch.Tensor  # `[R]`, int64, column of each row's pair, the last one that it sees
    own: torch.Tensor  # `[R]`, sequence of each row
    texts: torch.Tensor  # `[P]`, sequence of each column
    at: torch.Tensor  # `[R]`, position of each row
    places: torch.Tensor  # `[P]`, position of each column
    window: int | None  # visible positions including the row's; None for all

    def mask(self, columns: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, P]`, True where a row may look; with `columns` `[C]`, `[R, C]`."""
        columns = torch.arange(len(self.texts), device=self.rows.device) if columns is None else columns
        mask = (columns <= self.rows[:, None]) & (self.texts[columns] == self.own[:, None])
        return mask if self.window is None else mask & (self.at[:, None] - self.places[columns] < self.window)

    def of(self, rows: slice | torch.Tensor) -> Sight:
        return replace(self, rows=self.rows[rows], own=self.own[rows], at=self.at[rows])

    def ahead(self, steps: int) -> Sight:
        """The sight of drafts `steps` positions after the rows: the same columns, with the window moved on."""
        return replace(self, at=self.at + steps)

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields rows `[r]`, the columns `[c]` that any of them sees, and the mask `[r, c]`; no row comes twice."""
        for text in self.own.unique():
            columns = (self.texts == text).nonzero().flatten()
            for block in (self.own == text).nonzero().flatten().split(MASK_ROWS):
                sight = self.of(block)
                seen = columns[columns <= sight.rows.max()]
                if sight.window is not None:
                    seen = seen[sight.at.min() - sight.places[seen] < sight.window]
                yield block, seen, sight.mask(seen)


KeyValues = tuple[torch.Tensor, torch.Tensor]


def _attention_of_chains(
    queries: torch.Tensor,  # `[S, heads, head_dim]`
    keys: torch.Tensor,  # `[kv_heads, P, head_dim]`
    values: torch.Tensor,  # `[kv_heads, P, head_dim]`
    mask: torch.Tensor,  # `[S, P]`, True where a chain may look
    own_keys: torch.Tensor,  # `[kv_heads, S, steps, head_dim]`
    own_values: torch.Tensor,  # `[kv_heads, S, steps, head_dim]`
) -> torch.Tensor:
    """Attention of chains over a shared context and their own positions: `[S, heads * head_dim]`."""
    kv_heads, length, head_dim = keys.shape
    rows = len(queries)
    queries = queries.view(rows, kv_heads, -1, head_dim).permute(1, 0, 2, 3) * head_dim**-0.5
    flat = queries.reshape(kv_heads, -1, head_dim)
    scores = (flat @ keys.transpose(1, 2)).view(kv_heads, rows, -1, length)
    scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
    scores = torch.cat([scores, queries @ own_keys.transpose(2, 3)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(values.dtype)
    shared = weights[..., :length].reshape(kv_heads, -1, length) @ values
    mixed = shared.view(queries.shape) + weights[..., length:] @ own_values
    return mixed.permute(1, 0, 2, 3).reshape(rows, -1)


class PackedTexts:
    """Packed sequences and chains rolled from them, for one forward. Attention can be recomputed (checkpointing)."""

    def __init__(
        self,
        position_ids: torch.Tensor,  # `[T]`, of the pairs
        document_ids: torch.Tensor | None,  # `[T]`, of the pairs; None for a single sequence
        starts: torch.Tensor | None,  # `[S]`, the pairs at which chains start; None for the last one only
        window: int | None,  # attended positions, including the position itself; None for all
        steps: int,  # K
    ) -> None:
        texts = torch.zeros_like(position_ids) if document_ids is None else document_ids
        self._near = window is not None and len(texts) + steps > window
        rows = torch.arange(len(texts), device=position_ids.device)
        self._sight = Sight(rows, texts, texts, position_ids, position_ids, window if self._near else None)
        self.starts = rows[-1:] if starts is None else starts
        self._chains = self._sight.of(self.starts)
        self._layers: dict[int, KeyValues] = {}
        self._own: dict[tuple[int, int], KeyValues] = {}  # of the chains, by layer and step

    def reading(self) -> Attend:
        return self._read

    def _read(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        self._layers[layer] = keys, values
        sight = self._sight if rows is None else self._chains
        large = LARGE_MASK_GPU if queries.device.type == "cuda" else LARGE_MASK
        if len(sight.rows) * len(sight.texts) <= large:
            return shared_attention(queries, keys, values, self._mask if rows is None else sight.mask())
        order, parts = [], []
        for block, columns, mask in sight.blocks():  # computes no scores between sequences
            part = keys.index_select(1, columns), values.index_select(1, columns)
            parts.append(shared_attention(queries.index_select(0, block), *part, mask))
            order.append(block)
        return torch.cat(parts).index_select(0, torch.cat(order).argsort())

    @cached_property
    def _mask(self) -> torch.Tensor:  # shared by the layers
        return self._sight.mask()

    def rolling(self, step: int, chains: int) -> Attend:
        if self._near or step == 1:
            self._rolled = self._chains.of(slice(0, chains)).ahead(step).mask()
        return partial(self._roll, step, self._rolled)

    def _roll(
        self,
        step: int,
        mask: torch.Tensor,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Any,
    ) -> torch.Tensor:
        self._own[layer, step] = keys, values
        own = [self._own[layer, each] for each in range(1, step + 1)]
        own_keys, own_values = (torch.stack(side, dim=2) for side in zip(*own, strict=True))
        return _attention_of_chains(queries, *self._layers[layer], mask, own_keys, own_values)
