"""What a drafter has read of one text, for the next call that goes on from the same cache: a turn of a chat."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DraftMemory:
    """The memory of one text; it lies on the target's cache.

    Attributes:
        drafter: whose memory it is, a weak reference.
        length: of the text when the memory was made, the last token included.
        context: what the drafter had read; only its family knows what this is.
        pending: what was still waiting to be read.
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
        """Whether this is the drafter's memory of a text of that length, and lies where the drafter is."""
        place = drafter.device, drafter.dtype
        return self.drafter() is drafter and self.length == length and self.place == place

    def __reduce__(self) -> Any:
        """A cache that is stored forgets what the drafter had read."""
        return _forgotten, ()

    def __deepcopy__(self, memo: Any) -> DraftMemory:
        return self  # nothing in it is ever changed


def _forgotten() -> DraftMemory:
    return DraftMemory(lambda: None, 0, None, ())
