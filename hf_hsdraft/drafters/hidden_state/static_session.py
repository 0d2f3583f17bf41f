"""Session of a hidden-state drafter whose drafts are one compiled function each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.draft_tree import DraftTree
from ...trees.tree_builders import FoundNodes
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Verified
from .draft_session import HSDraftSession
from .static_roll_out import Followed, StaticRollOut


class StaticSession(HSDraftSession):
    """Drafts beams for one text by a [`StaticRollOut`], which then need no operator outside one compiled function.

    Where a draft follows a draft, acceptance, the accepted positions and the next draft are one function behind the
    target's forward, and a round reads back once. Foreseen draws, refinement, reuse and other trees take the states of
    a compiled roll-out, then continue as in [`HSDraftSession`].
    """

    _roll_out: StaticRollOut

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with_states = self._foresight is not None or self._refiner is not None or self._reuse != "none"
        self._beams = not with_states and self._options.tree_builder == "beam"
        self._sizes: tuple[int, int] | None = None  # `tree_size` and `beam_width` of this round's draft
        self._followed: Followed | None = None  # the next draft, if the target accepts as it assumes
        self._found: tuple[FoundNodes, tuple[int, int]] | None = None  # the next draft, and its sizes

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        [ask] = asks
        if not self._beams or self.on_expansion is not None:
            return super().trees(asks, depth, options)
        sizes = options.tree_size, options.beam_width
        if self._found is None:
            self._found = self._roll_out.beam(self.taken([0])[1], ask.root, *sizes), sizes
        found, of_sizes = self._found
        if of_sizes != sizes:  # the target reads other trees from here on
            return [DraftTree.root(ask.root)]
        self._sizes = sizes
        return [found.best_tree(0, options.tree_size, depth, options.threshold)]

    def follow(self, forward: Verified) -> list[int] | None:
        """See [`Session`]; a text that drafted nothing in this round does not draft now."""
        if self._sizes is None:
            return None
        self._followed = self._roll_out.follow(forward.to(self.drafter.device, self.drafter.dtype), *self._sizes)
        self.followed = self._followed.seconds
        return self._followed.choices

    def observe(self, news: Sequence[Accepted]) -> None:
        followed, sizes = self._followed, self._sizes
        self._followed = self._found = self._sizes = None
        self.followed = 0.0
        if followed is None or sizes is None or [each.tokens for each in news] != [followed.tokens]:
            super().observe(news)
            return
        self._take_tokens(news[0])
        self._guessed = {}
        self._roll_out.advance(len(followed.tokens))
        self._found = followed.found, sizes
