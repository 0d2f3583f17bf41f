"""The cache of a call as a row of slots: texts fill the first ones, and each forward reads its tokens into the next."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticCache

from .growing_cache import give_room_back, make_room
from .static_cache import StaticSlots
from .target_limits import cache_layers, layer_class, recurrent_layers


class CacheSlots:
    """A cache that drafts are read into, and cut back.

    Args:
        cache: it holds the prompts; `why_refused` has nothing against it.

    Attributes:
        static: the slots of a static cache.
        recurrent: whether some layers keep a state that cannot drop tokens.
        windows: widths of the layers that keep a window, by index.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.static = StaticSlots(cache) if isinstance(cache, StaticCache) else None
        self.recurrent = bool(recurrent_layers(cache))
        self.windows = {
            index: int(layer.sliding_window)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, DynamicSlidingWindowLayer)
        }

    @property
    def layers(self) -> list[Any]:
        return cache_layers(self.cache)

    @property
    def layers_with_keys(self) -> list[Any]:
        return [layer for layer in self.layers if getattr(layer, "keys", None) is not None]

    @property
    def length(self) -> int:
        """Number of slots that are filled."""
        return self.cache.get_seq_length() if self.static is None else self.static.filled

    @property
    def left(self) -> int:
        """Number of empty slots."""
        return sys.maxsize if self.static is None else self.static.left

    @property
    def hold_more_than_the_text(self) -> bool:
        """Whether some layers are longer than others, so that nobody can tell which slots are the text's."""
        return any(int(layer.get_seq_length()) != self.length for layer in self.layers_with_keys)

    def hold(self, count: int) -> bool:
        """Whether no plain layer has lost any of the first `count` slots."""
        plain = (layer for layer in self.layers_with_keys if layer_class(layer) is DynamicLayer)
        return all(layer.get_seq_length() >= count for layer in plain)

    def keep_past(self) -> None:
        """From here on windows and convolutions keep what they would drop, until `forget_past`."""
        for layer in self.layers:
            if layer.is_croppable and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def forget_past(self) -> None:
        """Lets windows and convolutions drop what no later forward reads."""
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                layer.crop(0)

    def make_room(self) -> None:
        """From here on plain layers grow in place."""
        make_room(self._of_text)

    def release(self) -> None:
        """Makes the layers work as they did before the call."""
        give_room_back(self._of_text)
        self.widen_windows(0)
        self.forget_past()
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False

    @property
    def _of_text(self) -> Any:
        return getattr(self.cache, "self_attention_cache", self.cache)

    def widen_windows(self, by: int) -> None:
        """Lets windows keep so many slots more than their own width."""
        for index, width in self.windows.items():
            self.layers[index].sliding_window = width + by

    def count(self, columns: int) -> None:
        """To be called when a forward has read so many columns."""
        if self.static is not None:
            self.static.filled += columns

    def drop(self, count: int) -> None:
        """Takes the last `count` slots out of the cache."""
        if self.static is None:
            self.cache.crop(-count)
        else:
            self.static.fill(self.static.filled - count)

    def move(self, source: torch.Tensor, goal: torch.Tensor, move_slots: Callable[..., None]) -> None:
        """Copies slots `source` to slots `goal` in every layer, each `[B, m]`, by a form of `move_slots`."""
        if self.static is not None:
            move_slots(self.static.states, source, goal)
            return
        self._wait_for_offloading()
        length = self.length
        for layer in self.layers_with_keys:
            gone = length - layer.keys.shape[-2]  # first slots, that a window's layer has dropped
            move_slots([layer.keys, layer.values], source - gone, goal - gone)

    def _wait_for_offloading(self) -> None:
        """An offloaded cache fetches layers beside the computation; none may arrive after it was changed."""
        stream = getattr(self.cache, "prefetch_stream", None)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def of_rows(self, places: Sequence[int]) -> CacheSlots:
        """Slots that hold copies of some rows of the batch."""
        few = copy.copy(self)
        few.cache = copy.copy(self.cache)
        few.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        few.cache.batch_select_indices(torch.tensor(places))
        return few
