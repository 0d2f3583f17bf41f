"""Conversations that are learned while the target still answers others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

_TOGETHER = 64  # new conversations that are shuffled together: a resumed run repeats so many at most


class StreamPlace(TrainerCallback, ExportableState):
    """Where a resumed stream continues; checkpoints keep it.

    Args:
        repeated: number of new conversations that earlier resumptions learned as new again.
        begin: number of known conversations that are not new any more.
    """

    def __init__(self, repeated: int = 0, begin: int = 0) -> None:
        self.repeated, self.begin = repeated, begin

    @classmethod
    def after(cls, samples: int, passes: int, stored: Mapping[str, Any]) -> StreamPlace:
        """Returns the place after so many samples; `stored` are the attributes in the checkpoint, empty for none."""
        before = stored.get("repeated", 0)
        learned = max(samples // passes - before, 0)  # at least, except for the slice that was interrupted
        begin = max(learned - _TOGETHER, 0)
        return cls(before + learned - begin, begin)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"repeated": self.repeated}}


class ChatStream(IterableDataset[Any]):
    """Conversations in the order of learning, without end.

    New conversations come in groups. Each time, as many earlier ones are drawn as it takes to learn each `passes` times
    on average. When no new ones are left, all are drawn again and again.

    Args:
        known: conversations that are there at the start.
        groups: yields further ones, as they are answered.
        passes: how often each is learned, on average.
        begin: number of known conversations that are not new, the first ones.
    """

    def __init__(
        self, known: Sequence[Any], groups: Iterable[Sequence[Any]], passes: int, seed: int, begin: int = 0
    ) -> None:
        self._known, self._groups, self._passes, self._begin = known, groups, passes, begin
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        chats = [(self._known, index) for index in range(len(self._known))]
        yield from self._learned(chats[self._begin :], chats)
        for group in self._groups:
            new = [(group, index) for index in range(len(group))]
            chats += new
            yield from self._learned(new, chats)
        while chats:
            yield from self._shuffled(chats, [])

    def _learned(self, new: Sequence[Any], chats: Sequence[Any]) -> Iterator[Any]:
        for at in range(0, len(new), _TOGETHER):
            yield from self._shuffled(new[at : at + _TOGETHER], chats)

    def _shuffled(self, new: Sequence[Any], chats: Sequence[Any]) -> Iterator[Any]:
        """Yields new conversations and, `passes` - 1 times as many, draws from all."""
        again = self._random.choices(chats, k=(self._passes - 1) * len(new)) if chats else []
        order = [*new, *again]
        self._random.shuffle(order)
        for chats_of_group, index in order:
            yield chats_of_group[index]
