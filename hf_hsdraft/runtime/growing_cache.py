"""A cache layer with room to grow: what is read is written in place, instead of copying all that was read before.

A `DynamicLayer` concatenates at every forward, which moves the whole cache once a round. Here keys and values are the
beginning of a buffer that is somewhat longer; dropping tokens shortens the view, and the next ones overwrite them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..core.tuning import TUNING


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose growth is amortised; all other operations are inherited and see the same tensors."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[torch.Tensor | None] = [None, None]

    @classmethod
    def of(cls, layer: DynamicLayer) -> GrowingLayer:
        """A layer that holds what `layer` does."""
        grown = cls()
        grown.__dict__.update(vars(layer))
        return grown

    def as_dynamic(self) -> DynamicLayer:
        """A plain layer that holds the same, in tensors of just that size."""
        plain = DynamicLayer()
        plain.__dict__.update(vars(self))
        del plain.__dict__["_rooms"]
        if plain.is_initialized:
            plain.keys, plain.values = (
                states.clone(memory_format=torch.contiguous_format) for states in (self.keys, self.values)
            )
        return plain

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends `[B, heads, n, size]`; returns all there is, as views."""
        if not self.is_initialized or self.keys.numel() == 0 or key_states.requires_grad:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._appended(0, self.keys, key_states)
        self.values = self._appended(1, self.values, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._rooms = [None, None]  # the buffers held the other rows too

    def _appended(self, which: int, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What was held and what is new, in a buffer with room; `which` is 0 for keys and 1 for values."""
        room, length = self._rooms[which], held.shape[-2]
        end = length + new.shape[-2]
        if room is None or end > room.shape[-2] or not _begins(room, held):
            spare = TUNING.spare_tokens + end // TUNING.spare_part
            room = held.new_empty(*held.shape[:-2], end + spare, held.shape[-1])
            room[..., :length, :] = held
            self._rooms[which] = room
        room[..., length:end, :] = new
        return room[..., :end, :]


def _begins(room: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether `held` is still the beginning of the buffer; beams, batches and offloading put other tensors there."""
    same_place = held.data_ptr() == room.data_ptr() and held.device == room.device and held.dtype == room.dtype
    return same_place and held.stride() == room.stride() and held.shape[:-2] == room.shape[:-2]


def make_room(cache: Cache) -> None:
    """Lets the plain layers of a cache grow in place; a cache that is offloaded moves its tensors, and stays."""
    if not cache.offloading:
        cache.layers[:] = [GrowingLayer.of(each) if type(each) is DynamicLayer else each for each in cache.layers]


def give_room_back(cache: Cache) -> None:
    """Makes the layers plain ones again."""
    cache.layers[:] = [each.as_dynamic() if isinstance(each, GrowingLayer) else each for each in cache.layers]
