"""The rounds of a call: draft, verify, tell. The algorithm of "Make Every Draft Count", whoever drafts or verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..drafters.protocol import Ask
from .drafting import Drafting
from .local_target import LocalTarget
from .observers import Observer, Round


def decode(
    target: LocalTarget,
    drafting: Drafting,
    goes_on: Callable[[], bool],
    before_round: Callable[[], None],
    observers: Sequence[Observer],
) -> None:
    """Runs rounds until all texts have ended.

    Args:
        target: verifies, and holds the texts.
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
        done = _round(asks, target, [len(tree) - 1 for tree in trees], target.forwards - forwards, drafting.depth)
        for each in observers:
            each.ended(done)


def _round(asks: Sequence[Ask], target: LocalTarget, nodes: Sequence[int], forwards: int, depth: int) -> Round:
    verdicts = [target.verdicts[ask.row] for ask in asks]
    emitted = [len(verdict.path) + 1 for ask, verdict in zip(asks, verdicts, strict=True) if ask.decides]
    return Round(nodes, [verdict.num_drafted for verdict in verdicts], forwards, emitted, depth)
