"""The observers of each call: its statistics, and the clock of its pace."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..runtime.target_forwards import Acceleration
from .call_output import DraftStatistics
from .drafting import Drafting
from .loop import Observer, Round


class StatisticsKeeper(Observer):
    """Records a call and its rounds in the statistics. With `timed` it waits for the device."""

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
        self.statistics.total_seconds = self._now() - self._begin

    def began(self) -> None:
        self._last = self._now()

    def drafted(self) -> None:
        self.enter("draft_seconds")

    def verified(self) -> None:
        self.enter("verify_seconds")

    def ended(self, done: Round) -> None:
        self.enter("commit_seconds")
        self.statistics.target_forwards += done.forwards if done.nodes else 0  # idle rounds keep processes in step
        self.statistics.row_forwards += len(done.nodes) * done.forwards
        self.statistics.accepted_lengths += done.accepted
        self.statistics.drafted_nodes += done.nodes
        self.statistics.relaxed_tokens += sum(each.num_relaxed for each in done.news)


class PaceTimer(Observer):
    """Reports times and results of rounds to the pace, and their ends to the acceleration.

    `changed` is called when forwards change, so that their costs have to be learnt again.
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
