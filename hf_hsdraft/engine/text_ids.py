"""The token ids of a batch's texts, in one buffer with room to grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..core.tensors import on_device
from ..core.tuning import TUNING


class TextIds:
    """Ids of rows that grow at their own pace, from prompts `[B, length]`; int64 once there are new ones.

    A new token is written behind its row; nothing else is copied, as long as there is room.

    Attributes:
        lengths: number of tokens of each row.
    """

    def __init__(self, prompts: torch.Tensor) -> None:
        self.lengths = [prompts.shape[1]] * len(prompts)
        self._room = prompts
        self._given = True  # the buffer is the caller's tensor, which stays as it is

    @property
    def device(self) -> torch.device:
        return self._room.device

    def of(self, row: int) -> torch.Tensor:
        """`[1, length]`, a view."""
        room = self._room if len(self._room) == 1 else self._room[row : row + 1]
        return room[:, : self.lengths[row]]

    def of_alike(self, rows: Sequence[int]) -> torch.Tensor:
        """`[n, length]` of rows of equal length; a view of all rows."""
        room = self._room if len(rows) == len(self._room) else self._room[on_device(rows, self.device)]
        return room[:, : self.lengths[rows[0]]]

    def begin(self, length: int) -> torch.Tensor:
        """`[B, length]`, a view of the first tokens of all rows, which have so many."""
        return self._room[:, :length]

    def all(self) -> torch.Tensor:
        """`[B, longest]`, shorter rows padded with 0 at the left."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return self.begin(longest)
        return torch.cat([F.pad(self.of(row), (longest - length, 0)) for row, length in enumerate(self.lengths)])

    def append(self, row: int, tokens: Sequence[int]) -> None:
        begin, end = self.lengths[row], self.lengths[row] + len(tokens)
        self._make_room(end)
        self._room[row, begin:end] = on_device(tokens, self.device)
        self.lengths[row] = end

    def append_to_each(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Appends a token to each of `rows`."""
        ends = [self.lengths[row] for row in rows]
        self._make_room(max(ends) + 1)
        new = on_device(tokens, self.device)
        if len(rows) == len(self._room) and min(ends) == max(ends):
            self._room[:, ends[0]] = new
        else:
            self._room[on_device(rows, self.device), on_device(ends, self.device)] = new
        for row in rows:
            self.lengths[row] += 1

    def _make_room(self, length: int) -> None:
        if length > self._room.shape[1] or self._given:
            spare = TUNING.spare_tokens + length // TUNING.spare_part
            self._room = F.pad(self._room, (0, length + spare - self._room.shape[1])).long()
            self._given = False
