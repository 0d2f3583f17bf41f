"""The context of a trunk for a single text: keys and values in rooms that grow. `PackedTexts` is that of several."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...core.tensors import shared_attention
from ...core.tuning import TUNING
from ..base.packed_texts import Attend


class GrowingText:
    """A single text in rooms that grow with it; what is rolled stands behind what was read, until more is read.

    Args:
        keys, values: of each layer, `[kv_heads, capacity, head_dim]`.
        window: positions that are attended to, the own one included; `None` for all.

    Attributes:
        length: number of positions that have been read.
    """

    starts = slice(-1, None)

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], window: int | None) -> None:
        self.keys, self.values, self._window = keys, values, window
        self.length = 0

    def extend(self, count: int, ahead: int) -> None:
        """Before `count` positions are read and `ahead` steps rolled after them."""
        needed = self.length + count + ahead
        if self.keys[0].shape[1] < needed:
            capacity = needed + TUNING.spare_tokens + self.length // TUNING.spare_part
            self.keys, self.values = ([self._moved(old, capacity) for old in side] for side in (self.keys, self.values))
        self.length += count

    def _moved(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        room = old.new_empty(old.shape[0], capacity, old.shape[2])
        room[:, : self.length] = old[:, : self.length]
        return room

    def reading(self) -> Attend:
        return partial(self._attend, self.length)

    def rolling(self, step: int, chains: int) -> Attend:
        return partial(self._attend, self.length + step)

    def _attend(
        self, end: int, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        """Keeps keys and values of the last positions up to `end`; the queries are of the last ones too."""
        begin = end - keys.shape[1]
        self.keys[layer][:, begin:end], self.values[layer][:, begin:end] = keys, values
        return self._mixed(layer, queries, end)

    def _mixed(self, layer: int, queries: torch.Tensor, end: int) -> torch.Tensor:
        rows, window = len(queries), self._window or end
        masked = rows > 1 and (end > rows or rows > window)
        most = TUNING.mask_rows
        if masked and rows > most:
            ends = range(end - rows + most, end + most, most)
            blocks = zip(queries.split(most), ends, strict=True)
            return torch.cat([self._mixed(layer, block, min(block_end, end)) for block, block_end in blocks])
        begin = max(end - rows + 1 - window, 0)  # of what the first row sees
        keys, values = self.keys[layer][:, begin:end], self.values[layer][:, begin:end]
        if rows == 1:
            return shared_attention(queries, keys, values)
        if masked:
            first = end - begin - rows  # column of the first row's own position
            seen = torch.ones(rows, end - begin, dtype=torch.bool, device=queries.device)
            return shared_attention(queries, keys, values, seen.tril(first).triu(first + 1 - window))
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(rows, -1)
