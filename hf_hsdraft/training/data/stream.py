"""Conversations that are learned while the target still answers others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset


class ChatStream(IterableDataset[Any]):
    """Conversations in the order of learning, without end.

    New conversations come in groups. Each time, as many earlier ones are drawn as it takes to learn each `passes` times
    on average. When no new ones are left, all are drawn again and again.

    Args:
        known: conversations that are there at the start.
        groups: yields further ones, as they are answered.
        passes: how often each is learned, on average.
        learned: whether the known ones have been learned before, as in a resumed run.
    """

    def __init__(
        self, known: Sequence[Any], groups: Iterable[Sequence[Any]], passes: int, seed: int, learned: bool = False
    ) -> None:
        self._known, self._groups, self._passes, self._learned = known, groups, passes, learned
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        chats = [(self._known, index) for index in range(len(self._known))]
        if not self._learned:
            yield from self._shuffled(chats, chats)
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
