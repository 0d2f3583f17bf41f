"""The rounds of a text whose target is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..drafters.base.protocol import Accepted as News
from ..drafters.base.protocol import Ask, DraftCall, Drafter
from ..engine.drafting import Drafting
from ..engine.observers import Observer, PaceTimer, Round, StatisticsKeeper
from ..engine.round_loop import decode
from ..pace.pacing import FixedPace, KindOfCall, pace_for
from ..runtime.acceleration import Acceleration
from .remote_target import RemoteTarget


@dataclass
class Streaming(Observer):
    """Hands the tokens of each round to a streamer."""

    streamer: Any

    def ended(self, done: Round) -> None:
        for news in done.news:
            self.streamer.put(torch.tensor(news.tokens))


class _SharedDrafting(Drafting):
    """Drafts no more nodes than the server has room for, where many texts share a forward.

    Args:
        drafter, call: see `Drafting`.
        target: says how many.
    """

    def __init__(self, drafter: Drafter, call: DraftCall, target: RemoteTarget) -> None:
        super().__init__(drafter, call, lambda row, tree: tree)
        self._target = target

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """The best nodes of what is drafted. Any part of a tree is verified exactly by the target's own choice."""
        return [tree.first(self._target.most_nodes) for tree in super().draft(asks)]


def decode_rounds(
    target: RemoteTarget,
    drafter: Drafter | None,
    draft: DraftCall | None,
    keeper: StatisticsKeeper,
    observers: Sequence[Observer],
) -> None:
    """Runs the prompt and all rounds of a text.

    Args:
        target: the text at the server.
        drafter: drafts here; `None` where the server decodes by itself.
        draft: what the drafter is called with.
        keeper: gets the statistics.
        observers: told of each round, the prompt's included.

    Raises:
        LinkLost: the connection was lost for longer than the patience.
        ServerRefused: the server does not do it.
    """
    keeper.began()
    first = target.open()
    keeper.enter("prefill_seconds")
    keeper.statistics.target_forwards, keeper.statistics.row_forwards = 1, 1
    for each in observers:
        each.ended(Round([], [], [first], 1, 0))
    if drafter is None or draft is None:
        while not target.finished:
            _tell(observers, target.receive())
            keeper.statistics.target_forwards += 1
            keeper.statistics.row_forwards += 1
        return
    drafting = _SharedDrafting(drafter, draft, target)
    drafting.observe([first])
    drafting.pace = FixedPace() if draft.options.tree_sizing == "fixed" else _pace(drafter, draft, drafting)
    timer = PaceTimer(drafting, Acceleration(draft.target), lambda: None)
    decode(target, drafting, lambda: not target.finished, lambda: None, [keeper, timer, *observers])
    drafting.session.end()


def _pace(drafter: Drafter, call: DraftCall, drafting: Drafting) -> Any:
    """The pace of a call. The way there and back is in the cost of every round, so drafts grow deeper."""
    session, draft = drafting.session, call.options
    by = (type(session).__qualname__, *session.kind, draft.beam_width, repr(sorted(draft.own.items())))
    depth = 0 if session.free else draft.depth
    return pace_for(call.target, drafter, KindOfCall(by, by, depth, draft.tree_size), draft.costs)


def _tell(observers: Sequence[Observer], news: News) -> None:
    for each in observers:
        each.ended(Round([], [], [news], 1, 0))
