"""Where a cache stands, and how it is put back to there: after trials, and when a forward was interrupted."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from ..core.refusals import DraftingRefused
from .cache_slots import CacheSlots
from .growing_cache import GrowingLayer


@dataclass(frozen=True)
class Mark:
    """Where a cache stands.

    Attributes:
        slots: number that is filled.
        copies: of the layers that cannot drop tokens, by index.
        held: what the other layers hold, by index and attribute; see `_held_by`.
    """

    slots: int
    copies: dict[int, Any]
    held: dict[int, dict[str, Any]]


def mark(slots: CacheSlots, before_commit: bool = False) -> Mark:
    """Where the cache stands now.

    Args:
        before_commit: also copy layers that a commit makes forget what came before, windows and convolutions.
    """
    copies, held = {}, {}
    for index, layer in enumerate(slots.layers):
        forgets = index in slots.windows or isinstance(layer, LinearAttentionCacheLayerMixin)
        if (slots.recurrent and not layer.is_croppable) or (before_commit and forgets):
            copies[index] = copy.deepcopy(layer)
        elif slots.static is None:
            held[index] = _held_by(layer)
    return Mark(slots.length, copies, held)


def roll_back(slots: CacheSlots, mark: Mark) -> None:
    """Puts the cache back to a mark, once.

    A forward may have stopped between two layers, or between the keys and the values of one. So nothing is concluded
    from what one tensor has grown by to another.
    """
    if slots.static is not None:
        slots.static.fill(mark.slots)
        return
    layers = slots.layers
    for index, layer in enumerate(layers):
        if index in mark.copies:
            layers[index] = mark.copies[index]
        else:
            vars(layer).update(mark.held[index])
            _cut(layer, mark.slots)


def restore(slots: CacheSlots, mark: Mark) -> None:
    """As `roll_back`, also after a commit, if the mark was made for that."""
    slots.widen_windows(0)
    roll_back(slots, mark)


def _held_by(layer: Any) -> dict[str, Any]:
    """What a cache layer that can drop tokens holds, by attribute, without a copy.

    A forward and a commit put other tensors in the place of these, and never write into them. Keys and values that only
    grow at their end are left out: their beginning stays, and two of them would take twice the memory.
    """
    if type(layer) in (DynamicLayer, GrowingLayer):
        return {}
    grows = () if getattr(layer, "is_sliding", False) else ("keys", "values")
    copied = (dict, list)  # states by their number or name
    return {
        name: copy.copy(value) if isinstance(value, copied) else value
        for name, value in vars(layer).items()
        if name not in grows
    }


def _cut(layer: Any, slots: int) -> None:
    """Leaves at most the first `slots` of keys and values, of each by itself; a window never holds more than that."""
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        if states is not None and states.dim() > 1 and states.shape[-2] > slots:
            setattr(layer, name, states[..., :slots, :])


@contextlib.contextmanager
def as_given(cache: Any) -> Iterator[None]:
    """If drafting is refused inside, the cache of a call is as it was again, whatever was read into it.

    Args:
        cache: `None` if the call has none yet.
    """
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
    """What a cache layer holds by attribute; and if keys and values grow at their end, how many slots instead of them.

    Reading overwrites no slot that is filled, so keys and values are not copied.
    """
    states, grows = ("keys", "values"), type(layer) in (DynamicLayer, GrowingLayer)
    held = {name: copy.deepcopy(value) for name, value in vars(layer).items() if name not in states}
    if grows:
        return held, layer.get_seq_length()
    return held | {name: value for name, value in vars(layer).items() if name in states}, None
