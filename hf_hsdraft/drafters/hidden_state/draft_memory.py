"""What a drafter has read of one text, for the next call that goes on from the same cache: a turn of a chat."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .contexts import DraftContext
from .network import HSDraftNetwork


@dataclass(frozen=True)
class DraftMemory:
    """The memory of one text; it lies on the target's cache.

    Attributes:
        drafter: whose memory it is, a weak reference.
        length: of the text when the memory was made, the last token included.
        context: what the trunk had read.
        pending: what was still waiting to be read.
    """

    drafter: Callable[[], HSDraftNetwork | None]
    length: int
    context: DraftContext
    pending: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, drafter: HSDraftNetwork, length: int, context: DraftContext, pending: Sequence[Any]) -> DraftMemory:
        return cls(weakref.ref(drafter), length, context, tuple(pending))

    def fits(self, drafter: HSDraftNetwork, length: int) -> bool:
        """Whether this is the drafter's memory of a text of that length, and lies where the drafter is."""
        if self.drafter() is not drafter or self.length != length:
            return False
        states = [state for part in self.pending for state in part[:2]]
        return all(state.device == drafter.device and state.dtype == drafter.dtype for state in states)

    def __reduce__(self) -> Any:
        """A cache that is stored forgets what the drafter had read."""
        return _forgotten, ()

    def __deepcopy__(self, memo: Any) -> DraftMemory:
        return self  # nothing in it is ever changed


def _forgotten() -> DraftMemory:
    return DraftMemory(lambda: None, 0, DraftContext(), ())
