"""Sessions that keep keys and values of accepted positions, and the store that holds them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.tensors import on_device
from ...core.tuning import SPARE_PART, SPARE_TOKENS
from ...drafters.base.protocol import Call
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.tree_session import Columns, ParallelSession, ReadingSession

_NOWHERE = 2**62  # position of an empty slot, beyond any query


@dataclass(frozen=True)
class Slots:
    """Where accepted positions are stored: `[n]`, int64, row of each, and slot in the row's buffer."""

    rows: torch.Tensor
    slots: torch.Tensor


class RowContext:
    """Keys and values of accepted positions. Each row fills its buffer from slot 0; `lengths` are the filled slots.

    The first ones written to a layer decide its number of heads, their sizes and the dtype.
    """

    def __init__(self, rows: int, layers: int, device: torch.device) -> None:
        self.lengths = [0] * rows
        self._positions = torch.empty(rows, 0, dtype=torch.int64, device=device)
        self._layers: list[tuple[torch.Tensor, ...]] = [()] * layers  # keys and values; empty before the first ones

    @property
    def capacity(self) -> int:
        return self._positions.shape[1]

    def reserve(self, counts: dict[int, int], positions: torch.Tensor) -> Slots:
        """Makes room for `positions` `[n]`, int64, of which each row gets so many as `counts` says, row by row."""
        self._make_room(max(self.lengths[row] + count for row, count in counts.items()))
        device = self._positions.device
        taken = [(row, self.lengths[row] + each) for row, count in counts.items() for each in range(count)]
        slots = Slots(*on_device(taken, device).unbind(dim=1))
        self._positions[slots.rows, slots.slots] = positions.to(device)
        for row, count in counts.items():
            self.lengths[row] += count
        return slots

    def drafted(self, rows: Sequence[int], begin: int, count: int) -> Slots:
        """Makes room for drafted positions after the accepted ones, and returns their slots row by row.

        They are not counted and have no positions. Each row already has `begin` of them and gets `count` more.
        """
        self._make_room(self._longest(rows) + begin + count)
        device = self._positions.device
        texts = on_device(list(rows), device).repeat_interleave(count)
        return Slots(texts, self.drafted_slots(rows, begin, count).flatten())

    def drafted_slots(self, rows: Sequence[int], begin: int, count: int) -> torch.Tensor:
        """Returns the slots `[B, count]`; arguments as in `drafted`."""
        device = self._positions.device
        ends = on_device([self.lengths[row] for row in rows], device)
        return ends[:, None] + torch.arange(begin, begin + count, device=device)

    def _make_room(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        more = needed + SPARE_TOKENS + needed // SPARE_PART - self.capacity

        def grown(room: torch.Tensor, axis: int, value: int) -> torch.Tensor:
            shape = list(room.shape)
            shape[axis] = more
            return torch.cat([room, room.new_full(shape, value)], dim=axis)

        self._positions = grown(self._positions, 1, _NOWHERE)
        # Zeros, not uninitialised memory: a masked NaN still spoils the weighted sum.
        self._layers = [tuple(grown(room, 2, 0) for room in layer) for layer in self._layers]

    def write(self, layer: int, slots: Slots, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values `[n, kv_heads, head_dim]`; the sizes of values may differ."""
        if not self._layers[layer]:
            shape = len(self.lengths), self.capacity
            self._layers[layer] = tuple(
                states.new_zeros(shape[0], states.shape[1], shape[1], states.shape[2]) for states in (keys, values)
            )
        for room, states in zip(self._layers[layer], (keys, values), strict=True):
            room[slots.rows, :, slots.slots] = states.to(room.dtype)

    def view(self, layer: int, rows: Sequence[int], drafted: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values `[B, kv_heads, P, head_dim]`, up to `drafted` slots after the longest row."""
        end = self._longest(rows) + drafted
        keys, values = (self._picked(room[:, :, :end], rows) for room in self._layers[layer])
        return keys, values

    def seen(
        self, rows: Sequence[int], last: torch.Tensor, window: int | torch.Tensor | None = None, drafted: int = 0
    ) -> torch.Tensor | None:
        """Returns the mask `[B, n, P]` over `view`, True where a query may look; on a CPU None if all are True.

        Drafted slots have no positions, so they are False. On a GPU, testing for all True would synchronise.

        Args:
            last: `[B, n]`, int64, the last position that each query may see.
            window: visible positions up to `last`, for all queries or `[B, n]`; None for all positions.
        """
        positions = self._picked(self._positions[:, : self._longest(rows) + drafted], rows)[:, None]
        mask = positions <= last[..., None]
        if window is not None:
            mask &= positions > (last - window)[..., None]
        return None if not drafted and mask.device.type == "cpu" and bool(mask.all()) else mask

    def _longest(self, rows: Sequence[int]) -> int:
        return max(self.lengths[row] for row in rows)

    def _picked(self, room: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if list(rows) == list(range(len(room))):
            return room
        return room.index_select(0, on_device(list(rows), room.device))

    def drop(self, row: int, count: int) -> None:
        """Drops a row's last positions."""
        self.lengths[row] -= count
        self._positions[row, self.lengths[row] :] = _NOWHERE

    def copy_of(self, row: int) -> RowContext:
        """Returns a context with a copy of this row only."""
        other, length = RowContext.__new__(RowContext), self.lengths[row]
        other.lengths = [length]
        other._positions = self._positions[row : row + 1, :length].clone()
        other._layers = [tuple(room[row : row + 1, :, :length].clone() for room in layer) for layer in self._layers]
        return other


class ContextSession(ReadingSession):
    """Stores keys and values of accepted positions; `layers` attend to them.

    Families implement `read`, which stores those of the queued inputs.
    """

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call, layers: int) -> None:
        super().__init__(drafter, weights, call)
        self._context = RowContext(call.rows, layers, drafter.device)
        self._anchors: dict[int, torch.Tensor] = {}  # `[1]`, int64, the position of each row's last accepted token
        self._left: dict[int, Any] = {}  # what `read` keeps of each row's last position, beside keys and values

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        """Stores keys and values of queued inputs in `slots`; `counts` are each row's positions, row by row."""
        raise NotImplementedError

    def read_pending(self, rows: Sequence[int]) -> None:
        rows = [row for row in rows if self._pending[row]]
        if rows:
            counts, columns = self.taken(rows)
            for row, end in zip(rows, itertools.accumulate(counts.values()), strict=True):
                self._anchors[row] = columns[-1][end - 1 : end] + 1
            self.read(self._context.reserve(counts, columns[-1]), counts, columns)

    def anchors(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns the positions `[B, 1]` of the last accepted tokens, once `read_pending` has read the news."""
        return torch.stack([self._anchors[row] for row in rows])

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._pending))).difference(rows):
            self._context.drop(row, self._context.lengths[row])
            self._left.pop(row, None)
        super().keep(rows)

    def saved(self) -> Any:
        return self._context.copy_of(0), self._left.get(0)

    def restore(self, saved: Any) -> None:
        context, left = saved
        self._context, self._left = context.copy_of(0), {} if left is None else {0: left}


class ParallelContextSession(ContextSession, ParallelSession):
    """Drafts all depths at once, and attends to accepted positions.

    By default a drafter's `read` makes context states of the taps, and its `context_keys` each layer's keys and values
    of them.
    """

    reads_tokens = False

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        taps, positions = columns
        states, rope = self.drafter.read(taps), self.drafter.rotary(positions, taps.dtype)
        for index in range(self.drafter.config.num_hidden_layers):
            self._context.write(index, slots, *self.drafter.context_keys(index, states, rope))
