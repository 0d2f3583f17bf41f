"""Training by the clock: the learning rate follows the time that is left, and the run ends when none is left."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

_EVALUATION = 1 / 8  # greatest share of the time for an evaluation
_FINISH, _FINISH_SECONDS = 0.1, 20.0  # share of the time for saving and pictures, and its upper limit

Item = TypeVar("Item")


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training so that all of it, from now to the saved drafter, takes `minutes`.

    Steps, evaluations, pictures and the saving count, and so does the time before a resumption. Training reserves time
    for one more step, a last evaluation and what comes after it. An evaluation takes an eighth of the time at most:
    `within` cuts it, and later ones measure as much as the first one did.

    All processes follow the clock of the first one, so that their learning rates and last steps are the same.

    Args:
        warmup: share of the training in which the learning rate rises. After that it falls as a cosine.
        spent: seconds spent before this process.

    Attributes:
        spent: seconds spent when the clock was last read, those before this process included.
        evaluation_seconds: duration of the last evaluation; `None` before the first one.
        measured: how much an evaluation measures, by name; empty before the first one.
        ended: minutes of the budget that ended training; 0 while it continues.
    """

    def __init__(self, minutes: float, warmup: float = 0.05, spent: float = 0.0) -> None:
        self.minutes = minutes
        self.warmup = warmup
        self.spent = spent
        self.evaluation_seconds: float | None = None
        self.measured: dict[str, int] = {}
        self.ended = 0.0
        self._begin = time.monotonic() - spent
        self._step, self._since = math.inf, spent  # seconds of the shortest step; when this one began

    @classmethod
    def resumed(cls, minutes: float, stored: Mapping[str, Any]) -> TimeBudget:
        """Resumes a budget by its stored attributes, which are empty for a new run."""
        budget = cls(minutes)
        for name, value in stored.items():
            setattr(budget, name, value)
        budget._begin, budget._since = time.monotonic() - budget.spent, budget.spent
        return budget

    @property
    def evaluation_limit(self) -> float:
        """Greatest number of seconds of an evaluation."""
        return _EVALUATION * 60.0 * self.minutes

    @property
    def remaining(self) -> float:
        """Seconds until all of the time is over, that for saving included; at least 0."""
        return max(60.0 * self.minutes - (time.monotonic() - self._begin), 0.0)

    @property
    def _evaluation(self) -> float:
        return self.evaluation_limit if self.evaluation_seconds is None else self.evaluation_seconds

    @property
    def _reserve(self) -> float:
        """Seconds kept for another step, the last evaluation and what comes after it."""
        step = self._step if math.isfinite(self._step) else 0.0
        return step + self._evaluation + min(_FINISH * 60.0 * self.minutes, _FINISH_SECONDS)

    @property
    def _left(self) -> float:
        """Seconds left for training."""
        return 60.0 * self.minutes - self._reserve - self.spent

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        return min(1.0, self.spent / max(self.spent + self._left, 1e-9))

    def scale(self) -> float:
        """Returns the current factor of the peak learning rate."""
        if self.progress < self.warmup:
            return max(self.progress / self.warmup, 1e-3)
        return 0.5 * (1.0 + math.cos(math.pi * (self.progress - self.warmup) / (1.0 - self.warmup)))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self.scale())

    def within(self, items: Iterable[Item], name: str, seconds: float) -> Iterator[Item]:
        """Yields what an evaluation has time for, at least one item.

        The first time it yields items until `seconds` have passed, later as many again, so that the figures of all
        evaluations are comparable. `name` identifies the items.
        """
        known, begin, done = self.measured.get(name), time.monotonic(), 0
        for item in items:
            if known is not None:
                over = done >= known
            else:
                [over] = broadcast_object_list([done > 0 and time.monotonic() - begin >= seconds])
            if over:
                break
            yield item
            done += 1
        self.measured[name] = done

    def _read_clock(self) -> None:
        [self.spent] = broadcast_object_list([time.monotonic() - self._begin])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._read_clock()
        self._step, self._since = min(self._step, self.spent - self._since), self.spent
        if self._left <= 0.0:
            self.ended = self.minutes
            control.should_evaluate = control.should_save = control.should_training_stop = True
        elif self._left <= self._evaluation:  # the last evaluation would follow at once
            control.should_evaluate = control.should_save = False
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._read_clock()
        self._since = self.spent
        self.evaluation_seconds = (metrics or {}).get("eval_seconds", self.evaluation_seconds)

    def state(self) -> dict[str, Any]:
        names = ("spent", "evaluation_seconds", "measured", "ended")
        args = {"minutes": self.minutes, "warmup": self.warmup, "spent": self.spent}
        return {"args": args, "attributes": {name: getattr(self, name) for name in names}}
