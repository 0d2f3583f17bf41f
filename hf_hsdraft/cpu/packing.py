"""When the weights of a target are packed, and how long the copies stay.

Packing takes as long as some forwards, so a short call cannot gain by packing for itself. The copies therefore stay
after a call, for as long as the target lives. A later call takes them if each weight is still what was copied;
comparing takes less than half a plain forward.

Whether more forwards will come is unknown. So a target's weights are packed once forwards without packed weights, those
of earlier calls included, have lost as much time as packing takes. Then packing costs at most as much again as was lost
without it (the rule of "ski rental"). The call that packs should win that back itself, so a call with few tokens left
leaves it to the next one; where all calls are short, one packs in the end.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from ..core.forks import new_rlock
from .gguf_blocks import file_of
from .packed_weights import PackedWeights, linears_to_pack, small_rows
from .small_weights import KERNEL

PACKING_FORWARDS = 3.0  # number of plain forwards that packing takes as long as - measured: 3 to 7
# Part of a plain forward that packed weights save, in bfloat16, in float32, and by a GGUF file's blocks
# - measured on an AMD EPYC, SmolLM2-135M: 0.2, 0.1 and 0.7.
PACKING_SAVES = 0.2
PACKING_SAVES_FLOAT32 = 0.1
PACKING_SAVES_BLOCKS = 0.5
# How many times as much has to be lost before a call packs that is too short to win it back - by hand.
PACKING_PATIENCE = 5.0
# Number of tokens that a call may still emit, for which comparing the weights pays - by hand.
PACKING_LEAST_ROOM = 8


@dataclass
class _Stock:
    """What calls of a target leave to later ones."""

    copies: PackedWeights | None = None
    forwards: int = 0  # without packed weights, since the weights last changed
    tokens: int = 0  # that these emitted, of the longest text of each

    def pays(self, saves: float, room: int) -> bool:
        """Whether to pack now: that saves a part of a plain forward, and the call may emit `room` tokens more."""
        lost, cost = saves * self.forwards, PACKING_FORWARDS
        wins_back = room * lost >= cost * self.tokens
        return lost >= cost * (1.0 if wins_back else PACKING_PATIENCE)


_stocks: weakref.WeakKeyDictionary[Any, _Stock] = weakref.WeakKeyDictionary()
_lock = new_rlock()


class Packing:
    """The packed weights of one call.

    Args:
        asked_for: `True` packs before the first round, whatever the size; `None` when it pays, up to 2 GiB in the
            process; `False` never.
    """

    def __init__(self, target: Any, asked_for: bool | None) -> None:
        self._target, self._asked_for = target, asked_for
        self.weights: PackedWeights | None = None
        self._settled = asked_for is False  # nothing changes in this call any more
        self._room = 0  # number of tokens that the call may still emit

    @functools.cached_property
    def _has_blocks(self) -> bool:
        return self._target.device.type == "cpu" and file_of(self._target) is not None

    @property
    def may_pack(self) -> bool:
        """Whether weights are packed, or may be later in this call."""
        return self.weights is not None or not self._settled

    def in_use(self, later: Collection[Any] = ()) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Within, in this thread, layers multiply by the copies, if there are some; `later` is as for `standing_in`."""
        return self.weights.in_use(later) if self.weights else contextlib.nullcontext(lambda: None)

    @property
    def _saves(self) -> float:
        if self._has_blocks and KERNEL.operators() is not None:
            return PACKING_SAVES_BLOCKS
        return PACKING_SAVES if self._target.dtype == torch.bfloat16 else PACKING_SAVES_FLOAT32

    def begin(self, room: int) -> bool:
        """Takes earlier calls' copies, or packs if that was asked for; returns whether this call packs.

        `room` is the number of tokens that the call may emit.
        """
        self._room = room
        if self._settled:
            return False
        if self._asked_for:
            return self._pack()
        with _lock:
            stock = _stocks.setdefault(self._target, _Stock())
            if stock.copies is None:
                return stock.pays(self._saves, room) and self._pack()
            if room < PACKING_LEAST_ROOM:
                self._settled = True
                return False
            if stock.copies.serve(self._target, None):
                self.weights, self._settled = stock.copies, True
                return not stock.copies.made  # a short call may have left some to be made
            elif linears_to_pack(self._target, None):  # else only for calls that ask
                _stocks[self._target] = _Stock()
        return False

    def after_round(self, grown: int) -> bool:
        """Counts a forward, by which a text has grown so much; returns whether the next one packs."""
        self._room -= grown
        if self._settled:
            return False
        with _lock:
            stock = _stocks.setdefault(self._target, _Stock())
            stock.forwards, stock.tokens = stock.forwards + 1, stock.tokens + grown
            return stock.pays(self._saves, self._room) and self._pack()

    def _pack(self) -> bool:
        self._settled = True
        if not linears_to_pack(self._target, self._asked_for):
            return False
        with _lock:
            stock = _stocks.setdefault(self._target, _Stock())
            if stock.copies is not None and stock.copies.serve(self._target, self._asked_for):
                self.weights = stock.copies
                return False
            # If more is asked for than the default packs, existing copies are shared, without a limit.
            shared = stock.copies if self._asked_for else None
            stock.copies = None
            self.weights = PackedWeights.of(self._target, self._asked_for)
            if self.weights is None and _drop_others(self._target):
                self.weights = PackedWeights.of(self._target, self._asked_for)
            stock.copies = self.weights
            del shared  # kept until here, so that valid copies are shared
            return self.weights is not None


def prompt_rows(dtype: torch.dtype, room: int) -> int:
    """Number of tokens up to which a prompt's forward gains by packed weights; `room` is as for `begin`."""
    return 0 if KERNEL.operators() is None or room < PACKING_LEAST_ROOM else small_rows(dtype)


def has_copies(target: Any) -> bool:
    """Whether calls have packed the weights of a target."""
    stock = _stocks.get(target)
    return stock is not None and stock.copies is not None


def _drop_others(target: Any) -> bool:
    """Drops the copies of other targets, which their current calls keep; returns whether there were any."""
    others = [stock for other, stock in _stocks.items() if other is not target and stock.copies is not None]
    for stock in others:
        stock.copies, stock.forwards, stock.tokens = None, 0, 0
    return bool(others)
