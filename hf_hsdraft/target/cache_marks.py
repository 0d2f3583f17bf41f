"""Where a cache stands, and how it is put back to there: after trials, and when a forward was interrupted."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

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
