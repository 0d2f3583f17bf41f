"""A session that notes what it drafts from, so that its drafts can be repeated with other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...drafters.base.protocol import Accepted, Session
from ...trees.tree_builders import Expansion


class NotingSession(Session):
    """Takes the place of a session that has not drafted yet. It is for calls with one text.

    A class for a family derives from this one and from the family's session, in this order. It calls `note` before a
    tree grows.

    Args:
        session: the session, of the class that the derived class has as its second base.
        drafts: where expansions are noted, by the position i of the last pair (h_i, x_{i+1}) that they know.
    """

    def __init__(self, session: Session, drafts: dict[int, Expansion]) -> None:
        self.__dict__.update(session.__dict__)
        self._noted, self._start = drafts, 0

    def observe(self, news: Sequence[Accepted]) -> None:
        self._start = int(news[-1].positions[-1])
        super().observe(news)

    def note(self, expansion: Expansion) -> None:
        """Notes what the next tree grows from."""
        self._noted[self._start] = expansion


class NotingParallelSession(NotingSession):
    """The same for sessions that draft all depths in one forward: it notes every expansion that they make."""

    def expansion(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the children of the nodes of some trees, see `ParallelSession`."""
        expansion = super().expansion(*args, **kwargs)  # type: ignore[misc]
        self.note(expansion)
        return expansion
