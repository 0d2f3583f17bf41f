"""The cache of a call as a row of slots: texts fill the first ones, and each forward reads its tokens into the next."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from ..core.refusals import DraftingRefused
from ..core.tuning import SPARE_PART, SPARE_TOKENS
from .static_cache import StaticSlots

LAYERS_TOGETHER = 8  # number of layers whose keys grow together - by hand


class _Buffer:
    """A tensor `[B, layers, heads, slots, size]` with room for the keys, or the values, of layers of one shape.

    So slots are moved in all layers at once.
    """

    states: torch.Tensor  # from the first room on
    whole: torch.Tensor  # all layers' as one, `[B, heads, slots, size]`

    def __init__(self, layers: int) -> None:
        self._layers, self._form = layers, tuple[Any, ...]()

    def room(self, layer: int, held: torch.Tensor, length: int) -> torch.Tensor:
        """A layer's part, with at least `length` slots, which begins with `held`."""
        rows, heads, filled, size = held.shape
        form, spare = (held.dtype, held.device, heads, size), SPARE_TOKENS + length // SPARE_PART
        if rows > 1:  # apart: some attention takes rows and heads as one axis
            room = held.new_empty(rows, heads, length + spare, size)
            room[:, :, :filled] = held
            return room
        if self._form != form or self.states.shape[3] < length:
            self._form, self.states = form, held.new_empty(rows, self._layers, heads, length + spare, size)
            self.whole = self.states.flatten(1, 2)
        self.states[:, layer, :, :filled] = held
        return self.states[:, layer]

    def around(self, states: torch.Tensor) -> torch.Tensor:
        """The whole, if this buffer holds `states`; else these."""
        inside = self._form and self.states.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()
        return self.whole if inside else states


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` with room to grow; all other operations are inherited and see the same tensors.

    A `DynamicLayer` concatenates at every forward, which copies the whole cache once a round. Here keys and values are
    views of the beginning of a longer buffer. Dropping tokens shortens the view, and the next ones overwrite them.

    Attributes:
        rooms: buffers that begin with the keys and the values, unless these were replaced; `None` before the first.
        buffers: of keys and of values, which other layers may share.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[torch.Tensor | None] = [None, None]
        self._place, self.buffers = 0, (_Buffer(1), _Buffer(1))

    @classmethod
    def of(cls, layers: Sequence[DynamicLayer]) -> list[GrowingLayer]:
        """Makes layers that share buffers; their keys must be alike, and their values."""
        buffers, made = (_Buffer(len(layers)), _Buffer(len(layers))), []
        for place, layer in enumerate(layers):
            grown = cls()
            grown.__dict__.update(vars(layer), _place=place, buffers=buffers)
            made.append(grown)
        return made

    def as_dynamic(self) -> DynamicLayer:
        """Converts to a plain layer, with tensors of exactly the size needed."""
        plain = DynamicLayer()
        plain.__dict__.update(vars(self))
        for name in ("rooms", "_place", "buffers"):
            del plain.__dict__[name]
        if plain.is_initialized:
            plain.keys, plain.values = (
                states.clone(memory_format=torch.contiguous_format) for states in (self.keys, self.values)
            )
        return plain

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends `[B, heads, n, size]`; returns everything, as views."""
        if not self.is_initialized or self.keys.numel() == 0 or key_states.requires_grad or key_states.dim() != 4:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._appended(0, self.keys, key_states)
        self.values = self._appended(1, self.values, value_states)
        return self.keys, self.values

    def make_rooms(self, count: int) -> None:
        """Moves keys and values to the beginning of `rooms`, which then have room for `count` more."""
        self.keys = self._room(0, self.keys, count)[..., : self.keys.shape[-2], :]
        self.values = self._room(1, self.values, count)[..., : self.values.shape[-2], :]

    def _appended(self, which: int, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Old and new states in a buffer with room; `which` is 0 for keys and 1 for values."""
        room, length = self._room(which, held, new.shape[-2]), held.shape[-2]
        end = length + new.shape[-2]
        room[..., length:end, :] = new
        return room[..., :end, :]

    def _room(self, which: int, held: torch.Tensor, count: int) -> torch.Tensor:
        room, length = self.rooms[which], held.shape[-2]
        end = length + count
        if room is None or end > room.shape[-2] or not _begins(room, held):
            room = self.rooms[which] = self.buffers[which].room(self._place, held, end)
        return room


def _begins(room: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether `held` is still the beginning of the buffer; beams, batches and offloading replace it."""
    kinds = [(t.data_ptr(), t.device, t.dtype, t.stride(), t.shape[:-2], t.shape[-1]) for t in (room, held)]
    return kinds[0] == kinds[1]


def make_room(cache: Cache) -> None:
    """Lets the plain layers of a cache grow in place, unless it is offloaded, which moves its tensors."""
    if cache.offloading:
        return
    alike: dict[Any, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            states = (layer.keys, layer.values) if layer.get_seq_length() else ()
            form = [(each[..., :0, :].shape, each.dtype, each.device) for each in states if each is not None]
            alike.setdefault(tuple(form) or index, []).append(index)
    for places in alike.values():
        for begin in range(0, len(places), LAYERS_TOGETHER):  # fewer take less memory while they grow
            some = places[begin : begin + LAYERS_TOGETHER]
            for index, layer in zip(some, GrowingLayer.of([cache.layers[index] for index in some]), strict=True):
                cache.layers[index] = layer


def give_room_back(cache: Cache) -> None:
    cache.layers[:] = [each.as_dynamic() if isinstance(each, GrowingLayer) else each for each in cache.layers]


@dataclass(frozen=True)
class Mark:
    """A state of a cache: filled slots, copies of layers that cannot drop tokens, and contents of the others
    (`_held_by`).
    """

    slots: int
    copies: dict[int, Any]
    held: dict[int, dict[str, Any]]


class CacheSlots:
    """A cache that holds the prompts. Drafts are read into it, and cropped after rejection.

    Attributes:
        static: the slots of a static cache.
        recurrent: whether some layers keep a state that cannot drop tokens.
        windows: widths of the sliding-window layers, by index.
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

    def attending(self, count: int) -> Sequence[int]:
        """Indices of the layers that `count` attentions belong to: hybrid models give none for recurrent layers."""
        every = range(len(self.layers))
        some = [index for index in every if getattr(self.layers[index], "keys", None) is not None]
        return some if len(some) == count else range(count)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length() if self.static is None else self.static.filled

    @property
    def size(self) -> int | None:
        """Number of slots of a static cache, filled or not; `None` for a dynamic one."""
        return None if self.static is None else self.static.size

    @property
    def left(self) -> int:
        return sys.maxsize if self.static is None else self.static.left

    @property
    def hold_more_than_the_text(self) -> bool:
        """Whether layers differ in length, so that the text's slots cannot be identified."""
        return any(int(layer.get_seq_length()) != self.length for layer in self.layers_with_keys)

    def hold(self, count: int) -> bool:
        """Whether every plain layer still has the first `count` slots."""
        plain = (layer for layer in self.layers_with_keys if layer_class(layer) is DynamicLayer)
        return all(layer.get_seq_length() >= count for layer in plain)

    def keep_past(self) -> None:
        """Makes windows and convolutions keep what they would drop, until `forget_past`."""
        for layer in self.layers:
            if layer.is_croppable and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def forget_past(self) -> None:
        """Lets windows and convolutions drop what no later forward reads."""
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                layer.crop(0)

    def make_room(self) -> None:
        """Makes plain layers grow in place from here on."""
        make_room(text_cache(self.cache))

    def release(self) -> None:
        """Restores the layers' behaviour from before the call."""
        give_room_back(text_cache(self.cache))
        self.widen_windows(0)
        self.forget_past()
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False

    def widen_windows(self, by: int) -> None:
        """Makes windows keep `by` slots more than their width."""
        for index, width in self.windows.items():
            self.layers[index].sliding_window = width + by

    def count(self, columns: int) -> None:
        """Must be called after a forward over `columns` columns."""
        if self.static is not None:
            self.static.filled += columns

    def drop(self, count: int) -> None:
        """Drops the last `count` slots."""
        if self.static is None:
            self.cache.crop(-count)
        else:
            self.static.fill(self.static.filled - count)

    def clear_rest(self) -> None:
        """Empties the slots of a static cache behind the filled ones, as before the call."""
        for states in () if self.static is None else self.static.states:
            states[:, :, self.length :] = 0

    def move(self, source: torch.Tensor, goal: torch.Tensor, move_slots: Callable[..., None]) -> None:
        """Copies slots `source` to slots `goal` in every layer, each `[B, m]`; `move_slots` may be compiled."""
        if self.static is not None:
            move_slots(self.static.states, source, goal)
            return
        if (prefetching := getattr(self.cache, "prefetch_stream", None)) is not None:
            # No prefetched layer of an offloaded cache may arrive after the cache was changed.
            torch.cuda.current_stream().wait_stream(prefetching)
        length, together = self.length, dict[int, torch.Tensor]()
        for layer in self.layers_with_keys:
            gone = length - layer.keys.shape[-2]  # first slots, that a window's layer has dropped
            if gone:
                move_slots([layer.keys, layer.values], source - gone, goal - gone)
                continue
            for which, states in enumerate((layer.keys, layer.values)):
                whole = layer.buffers[which].around(states) if isinstance(layer, GrowingLayer) else states
                together[whole.data_ptr()] = whole
        move_slots(list(together.values()), source, goal)

    def of_rows(self, places: Sequence[int]) -> CacheSlots:
        few = copy.copy(self)
        few.cache = copy.copy(self.cache)
        few.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        few.cache.batch_select_indices(torch.tensor(places))
        give_room_back(few.cache)  # buffers are the other rows'
        return few

    def mark(self, before_commit: bool = False, whole: bool = False) -> Mark:
        """Records the state; with `before_commit` also of windows and convolutions, which forget earlier states at a
        commit, and with `whole` of slots that the user's code may drop, which takes twice the memory.
        """
        copies, held = {}, {}
        for index, layer in enumerate(self.layers):
            forgets = index in self.windows or isinstance(layer, LinearAttentionCacheLayerMixin)
            if (self.recurrent and not layer.is_croppable) or (before_commit and forgets):
                copies[index] = copy.deepcopy(layer)
            elif self.static is None:
                held[index] = _held_by(layer, whole)
        return Mark(self.length, copies, held)

    def roll_back(self, mark: Mark) -> None:
        """Restores a mark, once; not after a commit.

        A forward may have stopped between two layers, or between the keys and the values of one, so each tensor is cut
        separately.
        """
        if self.static is not None:
            self.static.fill(mark.slots)
            return
        layers = self.layers
        for index, layer in enumerate(layers):
            if index in mark.copies:
                layers[index] = mark.copies[index]
            else:
                vars(layer).update(mark.held[index])
                _cut(layer, mark.slots)

    def restore(self, mark: Mark) -> None:
        """As `roll_back`, also after a commit if the mark was made with `before_commit`."""
        self.widen_windows(0)
        self.roll_back(mark)


def _held_by(layer: Any, whole: bool) -> dict[str, Any]:
    """Attributes of a cache layer that can drop tokens, without copying tensors.

    Forwards and commits replace these tensors and never write into them. Keys and values that only grow at their end
    are left out unless `whole`: cutting restores them, and keeping both would take twice the memory.
    """
    if type(layer) in (DynamicLayer, GrowingLayer):
        return {name: vars(layer)[name] for name in ("keys", "values") if whole and name in vars(layer)}
    grows = () if getattr(layer, "is_sliding", False) else ("keys", "values")
    copied = (dict, list)  # states by their number or name
    return {
        name: copy.copy(value) if isinstance(value, copied) else value
        for name, value in vars(layer).items()
        if name not in grows
    }


def _cut(layer: Any, slots: int) -> None:
    """Cuts keys and values to the first `slots` slots; a window never holds more."""
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        if states is not None and states.dim() > 1 and states.shape[-2] > slots:
            setattr(layer, name, states[..., :slots, :])


@contextlib.contextmanager
def as_given(cache: Any) -> Iterator[None]:
    """Restores the cache of a call if drafting is refused inside; `None` if the call has none yet."""
    decoder = isinstance(cache, EncoderDecoderCache)
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if decoder else () if cache is None else (cache,)
    before = [(part, list(part.layers), [_as_it_is(layer) for layer in part.layers]) for part in parts]
    updated = dict(cache.is_updated) if decoder else {}
    try:
        yield
    except DraftingRefused:
        for part, layers, held in before:
            part.layers[:] = layers
            for layer, (attributes, slots) in zip(layers, held, strict=True):
                vars(layer).update(attributes)
                if slots is not None:
                    _cut(layer, slots)
        if decoder:
            cache.is_updated = updated
        raise


def _as_it_is(layer: Any) -> tuple[dict[str, Any], int | None]:
    """Attributes of a cache layer; where keys and values grow at their end, their number of slots instead of them.

    Reading overwrites no filled slot, so keys and values are not copied.
    """
    states, grows = ("keys", "values"), type(layer) in (DynamicLayer, GrowingLayer)
    held = {name: copy.deepcopy(value) for name, value in vars(layer).items() if name not in states}
    if grows:
        return held, layer.get_seq_length()
    return held | {name: value for name, value in vars(layer).items() if name in states}, None


def move_slots(states: Sequence[torch.Tensor], source: torch.Tensor, goal: torch.Tensor) -> None:
    """Copies slots `source` `[B, m]` of each of `states` `[B, heads, slots, size]` to slots `goal`, in place."""
    for each in states:
        if source.device != each.device:
            source, goal = source.to(each.device), goal.to(each.device)
        if len(each) == 1:
            if each.device.type == "cpu":  # twice as fast there
                each.index_copy_(2, goal[0], each.index_select(2, source[0]))
            else:
                each[:, :, goal[0]] = each[:, :, source[0]]
        else:
            rows = torch.arange(len(each), device=each.device)[:, None]
            each[rows, :, goal] = each[rows, :, source]


def text_cache(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cache_layers(cache: Any) -> list[Any]:
    return text_cache(cache).layers


def layer_class(layer: Any) -> type:
    """The class of a cache layer before `make_room`."""
    return DynamicLayer if type(layer) is GrowingLayer else type(layer)


def recurrent_layers(cache: Any) -> list[Any]:
    """The layers that cannot drop their last tokens: an earlier copy has to replace them."""
    return [layer for layer in cache_layers(cache) if not layer.is_croppable and type(layer) is not StaticLayer]
