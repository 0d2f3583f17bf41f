"""The rounds of a text with a remote target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..drafters.base.protocol import Call, Drafter
from ..engine.drafting import Drafting
from ..engine.loop import Observer, Round, decode
from ..engine.observers import PaceTimer, StatisticsKeeper
from ..pace.pacing import KindOfCall
from ..runtime.target_forwards import Acceleration
from .remote_target import RemoteTarget


@dataclass
class Streaming(Observer):
    """Hands the tokens of each round to a streamer."""

    streamer: Any

    def ended(self, done: Round) -> None:
        for news in done.news:
            self.streamer.put(torch.tensor(news.tokens))


def decode_rounds(
    target: RemoteTarget,
    drafter: Drafter | None,
    call: Call | None,
    keeper: StatisticsKeeper,
    observers: Sequence[Observer],
) -> None:
    """Runs the prompt and all rounds of a text; without a drafter the server decodes by itself.

    Raises `LinkLost` if the connection was lost for longer than the patience, or `ServerRefused`.
    """
    keeper.began()
    first = target.open()
    keeper.enter("prefill_seconds")
    keeper.statistics.target_forwards, keeper.statistics.row_forwards = 1, 1
    for each in observers:
        each.ended(Round([], [], [first], 1, 0))
    if drafter is None or call is None:
        while not target.finished:
            news = target.receive()
            for each in observers:
                each.ended(Round([], [], [news], 1, 0))
            keeper.statistics.target_forwards += 1
            keeper.statistics.row_forwards += 1
        return
    drafting = Drafting(drafter, call)
    drafting.observe([first])
    session, options = drafting.session, call.options
    # The round trip is part of every round's cost, so drafts grow deeper.
    by = (type(session).__qualname__, *session.kind, options.beam_width, repr(sorted(options.own.items())))
    depth = 0 if session.free else options.depth
    drafting.set_pace(options, KindOfCall(by, by, depth, options.tree_size))
    timer = PaceTimer(drafting, Acceleration(call.target), lambda: None)
    decode(target, drafting, [keeper, timer, *observers])
    session.end()
