"""A session that notes what it drafts from, so that its drafts can be repeated with other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.draft_tree import DraftTree
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.protocol import Accepted, Ask
from ...drafters.base.tree_session import TreeSession
from ...trees.tree_builders import Expansion


class Noting(TreeSession):
    """What a noting session does beside the session whose class it is mixed into. It is for calls with one text."""

    _noted: dict[int, Expansion]
    _start = 0

    def observe(self, news: Sequence[Accepted]) -> None:
        self._start = int(news[-1].positions[-1])
        super().observe(news)

    def grown(self, asks: Sequence[Ask], expansion: Expansion, options: DraftOptions) -> list[DraftTree]:
        self._noted[self._start] = self.repeatable(asks, expansion, options)
        return super().grown(asks, expansion, options)

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        """Returns an expansion that can be asked again after the call; it need not be another one."""
        return expansion


def noting(session: Any, drafts: dict[int, Expansion], mixin: type[Noting] = Noting) -> Any:
    """Returns a session that drafts as another one does and notes its expansions.

    Args:
        session: that has not drafted yet. It is not to be used any more.
        drafts: where expansions are noted, by the position i of the last pair (h_i, x_{i+1}) that they know.
        mixin: what makes the expansions of a family repeatable.
    """
    made: Any = object.__new__(type(f"Noting{type(session).__name__}", (mixin, type(session)), {}))
    made.__dict__.update(session.__dict__, _noted=drafts)
    return made
