"""Conversations that are learned while the target still answers others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

_TOGETHER = 64  # known conversations that are shuffled together: a resumed run repeats so many at most


class ChatStream(IterableDataset[Any]):
    """Conversations in the order of learning, without end.

    New conversations come in groups. Each time, as many earlier ones are drawn as it takes to learn each `passes` times
    on average. When no new ones are left, all are drawn again and again.

    Args:
        known: conversations that are there at the start.
        groups: yields further ones, as they are answered.
        passes: how often each is learned, on average.
        drawn: how many were learned before, as often as that, by the run that is resumed; the first of the known ones.
    """

    def __init__(
        self, known: Sequence[Any], groups: Iterable[Sequence[Any]], passes: int, seed: int, drawn: int = 0
    ) -> None:
        self._known, self._groups, self._passes = known, groups, passes
        self._begin = max(drawn // passes - _TOGETHER, 0)
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        chats = [(self._known, index) for index in range(len(self._known))]
        for at in range(self._begin, len(chats), _TOGETHER):
            yield from self._shuffled(chats[at : at + _TOGETHER], chats)
        for group in self._groups:
            new = [(group, index) for index in range(len(group))]
            chats += new
            yield from self._shuffled(new, chats)
        while chats:
            yield from self._shuffled(chats, [])

    def _shuffled(self, new: Sequence[Any], chats: Sequence[Any]) -> Iterator[Any]:
        """Yields new conversations and, `passes` - 1 times as many, draws from all."""
        again = self._random.choices(chats, k=(self._passes - 1) * len(new)) if chats else []
        order = [*new, *again]
        self._random.shuffle(order)
        for chats_of_group, index in order:
            yield chats_of_group[index]
