"""Those who watch the rounds of a call without deciding anything of its text: clocks and statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..core.draft_tree import DraftTree
from ..drafters.base.protocol import Accepted, Ask
from ..runtime.acceleration import Acceleration
from .call_output import DraftStatistics
from .drafting import Drafting


@dataclass(frozen=True)
class Round:
    """What a round did.

    Attributes:
        asks: drafts that were wanted, of the texts that still grew.
        trees: tree that was verified for each text.
        news: what each text got.
        forwards: number of forwards of the target.
        depth: depth that the drafter's session was asked for; 0 where it was not asked. Its trees may be shallower.
    """

    asks: Sequence[Ask]
    trees: Sequence[DraftTree]
    news: Sequence[Accepted]
    forwards: int
    depth: int

    @property
    def nodes(self) -> list[int]:
        """Number of nodes that each text's tree had beside the root."""
        return [len(tree) - 1 for tree in self.trees]

    @property
    def accepted(self) -> list[int]:
        """Number of emitted tokens of each text that its tree held."""
        return [each.num_drafted for each in self.news]

    @property
    def emitted(self) -> list[int]:
        """Number of tokens emitted by each text that the batch waits for."""
        return [len(each.tokens) for ask, each in zip(self.asks, self.news, strict=True) if ask.decides]

    @property
    def progress(self) -> int:
        """Number of tokens by which the shortest text has become longer. The batch ends with it."""
        return min((ask.ahead + len(each.tokens) for ask, each in zip(self.asks, self.news, strict=True)), default=0)


class Observer:
    """Told of each round as it goes. A streamer of `generate()` may be one too, for its own call."""

    def began(self) -> None:
        """A round begins."""

    def drafted(self) -> None:
        """Its drafts are made."""

    def verified(self) -> None:
        """Its forward is done, and what is accepted is decided."""

    def ended(self, done: Round) -> None:
        """All is emitted, kept and told to the sessions."""


class StatisticsKeeper(Observer):
    """Enters a call and its rounds into the statistics.

    Args:
        statistics: are filled in.
        device: of the target.
        timed: whether times are taken. That waits for the device.
    """

    def __init__(self, statistics: DraftStatistics, device: torch.device, timed: bool) -> None:
        self.statistics, self._device, self._timed = statistics, device, timed
        self._begin = self._last = self._now()

    def _now(self) -> float:
        if self._timed and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() if self._timed else 0.0

    def enter(self, part: str) -> None:
        """Adds the time since the last entry, or since the round began, to a field."""
        now = self._now()
        setattr(self.statistics, part, getattr(self.statistics, part) + now - self._last)
        self._last = now

    def finish(self) -> None:
        """The call has ended."""
        self.statistics.total_seconds = self._now() - self._begin

    def began(self) -> None:
        self._last = self._now()

    def drafted(self) -> None:
        self.enter("draft_seconds")

    def verified(self) -> None:
        self.enter("verify_seconds")

    def ended(self, done: Round) -> None:
        self.enter("commit_seconds")
        self.statistics.target_forwards += done.forwards if done.nodes else 0  # idle ones keep processes in step
        self.statistics.row_forwards += len(done.nodes) * done.forwards
        self.statistics.accepted_lengths += done.accepted
        self.statistics.drafted_nodes += done.nodes
        self.statistics.relaxed_tokens += sum(each.num_relaxed for each in done.news)


class PaceTimer(Observer):
    """Tells the pace how long rounds take and what came of them, and the acceleration that they have ended.

    Args:
        changed: called when forwards become others, whose costs have to be learnt anew.
    """

    def __init__(self, drafting: Drafting, acceleration: Acceleration, changed: Callable[[], None]) -> None:
        self._drafting, self._acceleration, self._changed = drafting, acceleration, changed
        self._began = self._drafted = self._verified = 0.0

    def _now(self) -> float:
        return time.perf_counter() if self._drafting.pace.measures else 0.0

    def began(self) -> None:
        self._began = self._now()

    def drafted(self) -> None:
        self._drafted = self._now()

    def verified(self) -> None:
        self._verified = self._now()  # reading the choices has waited for the device

    def ended(self, done: Round) -> None:
        if not done.emitted:
            return
        emitted = sum(done.emitted) / len(done.emitted)
        seconds = None if self._acceleration.packs else self._verified - self._drafted
        draft_seconds = self._drafted - self._began
        pace = self._drafting.pace
        pace.note_round(max(done.nodes), emitted, seconds, done.depth, draft_seconds, done.progress)
        if self._acceleration.after_round():
            self._changed()
