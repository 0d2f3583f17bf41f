"""Ended rows of a batch leave the cache: forwards read only the others, and at the end the ended rows are put back.

Plain decoding reads padding for them until the last row has ended. With trees that is expensive, as every row is as
wide as the widest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .cache_slots import GrowingLayer
from .module_hooks import has_foreign_hooks


def can_leave(target: Any, model_kwargs: dict[str, Any], known: Collection[str], cache: Any) -> bool:
    """Whether rows can leave a call: `generate()` made the cache, of plain layers; only `known` inputs have rows."""
    others = [value for name, value in model_kwargs.items() if name not in known and value is not None]
    if not all(isinstance(value, (bool, int, float, str, Cache)) for value in others):
        return False
    # Hooks may depend on the row: PEFT's do with one adapter per row.
    if has_foreign_hooks(target):
        return False
    if type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False) or cache.offloading:
        return False
    return all(type(layer) in (DynamicLayer, GrowingLayer) and layer.keys is not None for layer in cache.layers)


class EndedRows:
    """Tracks which rows of a batch are still read (`staying`), and keeps the cache contents of the others if `keep`."""

    def __init__(self, num_rows: int, keep: bool) -> None:
        self.staying = list(range(num_rows))
        self._num_rows, self._keep = num_rows, keep
        self._held: dict[int, list[list[torch.Tensor]]] = {}  # by row and layer: keys, values `[heads, slots, size]`

    def take_out(self, cache: Cache, staying: Sequence[int], kept: Sequence[int]) -> None:
        """Leaves only some rows in the cache.

        Args:
            staying: their places in the current batch.
            kept: number of text slots of each row of the current batch.
        """
        for place in set(range(len(self.staying))) - set(staying) if self._keep else ():
            self._held[self.staying[place]] = [
                [states[place, :, : kept[place]].clone() for states in (layer.keys, layer.values)]
                for layer in cache.layers
            ]
        cache.batch_select_indices(torch.tensor(staying))
        self.staying = [self.staying[place] for place in staying]

    def put_back(self, cache: Cache, length: int) -> None:
        """Restores all rows of the cache, if it is kept: `length` slots, 0 where a row has not filled them."""
        if not self._keep or len(self.staying) == self._num_rows:
            return
        for index, layer in enumerate(cache.layers):
            layer.keys, layer.values = (
                self._joined(states, [held[index][which] for held in self._held.values()], length)
                for which, states in enumerate((layer.keys, layer.values))
            )
        self.staying, self._held = list(range(self._num_rows)), {}

    def _joined(self, states: torch.Tensor, held: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """`[B, heads, length, size]` of all rows: staying ones from `states`, the others from `held`."""
        _, heads, slots, size = states.shape
        joined = states.new_zeros(self._num_rows, heads, length, size)
        joined[torch.tensor(self.staying), :, : min(slots, length)] = states[:, :, :length]
        for row, part in zip(self._held, held, strict=True):
            joined[row, :, : min(part.shape[1], length)] = part[:, :length]
        return joined
