"""The time of a whole run, divided between its data and the training."""

from __future__ import annotations

import time
from pathlib import Path

from ..files import read_kept, write_json

_ANSWERS = 0.3  # share of the time for prompts and answers, if training waits for them
_FIRST_ANSWERS = 0.2  # the same, for those that a stream begins with
_LEAST_TRAINING = 0.1  # share that training gets even if all before it took longer
_LEAST_SECONDS = 2.0  # for a batch
_FILE = "clock.json"


class RunClock:
    """Counts the time of a run, also over interruptions, until its training begins.

    `TimeBudget` times the training, and gets the minutes that are left.

    Args:
        out: folder of the run, which keeps the time.
        minutes: of the whole run.
        stream: whether the drafter learns while the target still answers.
        stopped: whether training has begun before: no more time passes then, and nothing more is answered.
        began: when the run began, in seconds of `time.monotonic()`; `None` for now.
    """

    def __init__(self, out: Path, minutes: float, stream: bool, stopped: bool, began: float | None = None) -> None:
        self._out, self._minutes = out, minutes
        self.answer_minutes = minutes * (_FIRST_ANSWERS if stream else _ANSWERS)  # by when training should begin
        stored = read_kept(out / _FILE, "delete it, and the time of the run begins again")
        self._before, self._stopped = float(stored.get("seconds", 0.0)), stopped
        self.first: int | None = stored.get("first")  # number of conversations that training began with
        self._began = time.monotonic() if began is None else began

    @property
    def minutes(self) -> float:
        """Minutes so far."""
        return self._seconds / 60

    @property
    def _seconds(self) -> float:
        return self._before + (0.0 if self._stopped else time.monotonic() - self._began)

    def answers_go_on(self) -> bool:
        """Whether there is time for further answers, before training begins. Keeps the time so far."""
        self._keep()
        return not self._stopped and self.minutes < self.answer_minutes

    def hurries(self) -> bool:
        """Whether half of the time for answers before the training is over."""
        return not self._stopped and self.minutes > self.answer_minutes / 2

    def answer_seconds(self) -> float:
        """Returns the seconds left for answers before the training begins, at least a few."""
        return max(60 * self.answer_minutes - self._seconds, _LEAST_SECONDS)

    def training_minutes(self, first: int) -> float:
        """Stops the clock, and returns the minutes for training; `first` is the number of conversations so far."""
        self.first = first if self.first is None else self.first
        self._before, self._stopped = self._seconds, True
        self._keep()
        return max(self._minutes - self._before / 60, _LEAST_TRAINING * self._minutes)

    def _keep(self) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        write_json(self._out / _FILE, {"seconds": self._seconds, "first": self.first})
