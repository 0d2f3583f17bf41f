"""Rows of a batch that have ended leave the cache: forwards read the others alone, and at the end they are put back.

Plain decoding reads padding for them until the last row has ended. Under trees that is dear, as every row is as wide as
the widest one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .cache_slots import GrowingLayer
from .fingerprint import has_foreign_hooks


def can_leave(target: Any, model_kwargs: dict[str, Any], known: Collection[str], cache: Any) -> bool:
    """Whether rows can be taken out of a call: `generate()` made the cache, of plain layers, and nothing else has rows.

    Args:
        model_kwargs: what the target is given.
        known: names among these whose rows are taken out too.
    """
    others = [value for name, value in model_kwargs.items() if name not in known and value is not None]
    if not all(isinstance(value, (bool, int, float, str, Cache)) for value in others):
        return False
    # Hooks may depend on the row, as PEFT's do where each row has its own adapter.
    if has_foreign_hooks(target):
        return False
    if type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False) or cache.offloading:
        return False
    return all(type(layer) in (DynamicLayer, GrowingLayer) and layer.keys is not None for layer in cache.layers)


class EndedRows:
    """Which rows of a batch are still read, and what the cache held of the others.

    Args:
        num_rows: number of rows of the whole batch.
        keep: whether what the cache holds is put back at the end.

    Attributes:
        staying: numbers of the rows that are still read.
    """

    def __init__(self, num_rows: int, keep: bool) -> None:
        self.staying = list(range(num_rows))
        self._num_rows, self._keep = num_rows, keep
        self._held: dict[int, list[list[torch.Tensor]]] = {}  # of each row: keys and values `[heads, slots, size]`

    def take_out(self, cache: Cache, staying: Sequence[int], kept: Sequence[int]) -> None:
        """Leaves only some rows in the cache.

        Args:
            staying: their places in the batch as it is read now.
            kept: number of slots that hold the text of each of its rows.
        """
        for place in set(range(len(self.staying))) - set(staying) if self._keep else ():
            self._held[self.staying[place]] = [
                [states[place, :, : kept[place]].clone() for states in (layer.keys, layer.values)]
                for layer in cache.layers
            ]
        cache.batch_select_indices(torch.tensor(staying))
        self.staying = [self.staying[place] for place in staying]

    def put_back(self, cache: Cache, length: int) -> None:
        """Makes the cache hold all rows again, if it is kept: `length` slots, 0 where a row has not filled them."""
        if not self._keep or len(self.staying) == self._num_rows:
            return
        for index, layer in enumerate(cache.layers):
            layer.keys, layer.values = (
                self._joined(states, [held[index][which] for held in self._held.values()], length)
                for which, states in enumerate((layer.keys, layer.values))
            )
        self.staying, self._held = list(range(self._num_rows)), {}

    def _joined(self, states: torch.Tensor, held: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """`[B, heads, length, size]` of all rows: those that stay from `states`, the others from `held`."""
        _, heads, slots, size = states.shape
        joined = states.new_zeros(self._num_rows, heads, length, size)
        joined[torch.tensor(self.staying), :, : min(slots, length)] = states[:, :, :length]
        for row, part in zip(self._held, held, strict=True):
            joined[row, :, : min(part.shape[1], length)] = part[:, :length]
        return joined
