"""A drafter's state for one sequence, kept for the next call on the same cache (a chat turn)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DraftMemory:
    """Drafter state of one sequence, stored on the target's cache.

    Attributes:
        drafter: weak reference to the drafter that made it.
        length: of the sequence then, including the last token.
        context: what the drafter had read; opaque outside its family.
        pending: accepted positions not read yet.
        place: device and dtype of the drafter then.
    """

    drafter: Callable[[], Any]
    length: int
    context: Any
    pending: tuple[Any, ...]
    place: tuple[Any, ...] = ()

    @classmethod
    def of(cls, drafter: Any, length: int, context: Any, pending: Sequence[Any]) -> DraftMemory:
        return cls(weakref.ref(drafter), length, context, tuple(pending), (drafter.device, drafter.dtype))

    def fits(self, drafter: Any, length: int) -> bool:
        """Whether this memory is this drafter's, for a sequence of that length, on its current device and dtype."""
        place = drafter.device, drafter.dtype
        return self.drafter() is drafter and self.length == length and self.place == place

    def __reduce__(self) -> Any:
        """Pickling a cache drops the memory."""
        return _forgotten, ()

    def __deepcopy__(self, memo: Any) -> DraftMemory:
        return self  # immutable


def _forgotten() -> DraftMemory:
    return DraftMemory(lambda: None, 0, None, ())
