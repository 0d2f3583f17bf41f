"""Separate keys and values for each text, joined into one batch for a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..runtime.cache_slots import make_room


class JoinedLayer(DynamicLayer):
    """A cache layer of several texts; attention sees them padded to the longest. Only new keys and values are stored.

    `keep` appends new slots to the texts' layers. Until then these are unchanged, so a failed forward or a rejected
    draft leaves no trace.

    Args:
        held: the layer of each text, keys and values `[1, heads, length, size]`.
    """

    def __init__(self, held: Sequence[DynamicLayer]) -> None:
        super().__init__()
        self._held, self._read = held, 0
        self._longest = max(each.get_seq_length() for each in held)
        if held[0].is_initialized:  # layers that share the keys of others have none
            self.lazy_initialization(held[0].keys, held[0].values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states `[B, heads, n, size]`; returns old and new ones, joined."""
        self.keys, self.values = key_states, value_states
        self._read = key_states.shape[-2]
        return self._joined("keys", key_states), self._joined("values", value_states)

    def _joined(self, which: str, new: torch.Tensor) -> torch.Tensor:
        rows, heads, count, size = new.shape
        joined = new.new_zeros(rows, heads, self._longest + count, size)  # masked values must be finite
        for row, layer in enumerate(self._held):
            joined[row, :, : layer.get_seq_length()] = getattr(layer, which)[0]
        joined[:, :, self._longest :] = new
        return joined

    def get_seq_length(self) -> int:
        return self._longest + self._read

    def keep(self, row: int, nodes: slice | torch.Tensor) -> None:
        if self._read:
            self._held[row].update(*(states[row : row + 1, :, nodes] for states in (self.keys, self.values)))


def joined_cache(caches: Sequence[DynamicCache]) -> Cache:
    return Cache(layers=[JoinedLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)])


def empty_cache() -> DynamicCache:
    """Returns the cache of a new text. Its layers keep all positions; masks implement sliding windows."""
    return DynamicCache()


def grown(cache: DynamicCache) -> DynamicCache:
    """Prepares the cache of a text after its prompt to grow in place; returns it."""
    make_room(cache)
    return cache


def bytes_of(cache: Cache) -> int:
    """Returns the size of the keys and values in a cache, without spare room."""
    states = (getattr(layer, which, None) for layer in cache.layers for which in ("keys", "values"))
    return sum(each.numel() * each.element_size() for each in states if each is not None)
