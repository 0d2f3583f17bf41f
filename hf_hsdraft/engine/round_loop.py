"""The rounds of a call: draft, verify, tell. The algorithm of "Make Every Draft Count", whoever drafts or verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..core.draft_tree import DraftTree
from ..drafters.base.protocol import Accepted, Ask
from .drafting import Drafting
from .observers import Observer, Round


class Target(Protocol):
    """Verifies drafts, and holds the texts. The prompts have been read.

    Attributes:
        forwards: number of forwards so far.
    """

    @property
    def forwards(self) -> int: ...

    def asks(self) -> list[Ask]:
        """The drafts that are wanted for the next round, of the texts that still grow."""
        ...

    def advance(self, drafts: Sequence[DraftTree], verified: Callable[[], None]) -> list[Accepted]:
        """Verifies drafts, emits and keeps what is accepted; returns it, in the order of `asks`.

        Args:
            verified: to be called when the forward is done and everything is decided.
        """
        ...


def decode(
    target: Target,
    drafting: Drafting,
    goes_on: Callable[[], bool],
    before_round: Callable[[], None],
    observers: Sequence[Observer],
) -> None:
    """Runs rounds until all texts have ended.

    Args:
        target: verifies.
        drafting: proposes, and learns what became of it.
        goes_on: whether there is another round.
        before_round: prepares it: limits of what may be drafted, texts that leave.
        observers: told of each round, in this order.
    """

    def verified() -> None:
        for each in observers:
            each.verified()

    while goes_on():
        before_round()
        for each in observers:
            each.began()
        asks, forwards = target.asks(), target.forwards
        trees = drafting.draft(asks)
        for each in observers:
            each.drafted()
        news = target.advance(trees, verified)
        drafting.observe(news)
        done = Round(asks, trees, news, target.forwards - forwards, drafting.depth)
        for each in observers:
            each.ended(done)
