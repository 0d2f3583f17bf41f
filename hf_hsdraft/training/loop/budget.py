"""A run by the clock: a part of its time is for answers; training ends when none is left. And how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ...core.progress import Stage
from ..files import read_kept, write_json

ANSWERS, FIRST_ANSWERS = 0.3, 0.2  # shares of the time: for all answers, or for those that a stream begins with
_LEAST_TRAINING = 0.1  # share that training gets even if all before it took longer
_WARMUP = 0.05  # share of the training
_EVALUATION = 1 / 8  # greatest share of the time for an evaluation
_FINISH, _FINISH_SECONDS = 0.1, 20.0  # share of the time for saving and pictures, and its upper limit

Item = TypeVar("Item")


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training so that all of it, from now to the saved drafter, takes `minutes`.

    The time before a resumption counts. Training reserves time for one more step, a last evaluation and what comes
    after it. An evaluation takes an eighth of the time at most: `within` cuts it. The learning rate rises for a
    twentieth of the training, then falls as a cosine. All processes follow the clock of the first one.

    Args:
        minutes: infinite for no limit.
        out: folder of a run whose answers count too; it keeps their time. Once `begin_training` is called, `minutes`
            are what is left of it.
        answers: share of the minutes after which training should begin; 0 for at once.
        began: when the run began, in seconds of `time.monotonic()`; `None` for now.

    Attributes:
        spent: seconds spent when the clock was last read, those before this process included.
        evaluation_seconds: duration of the last evaluation; `None` before the first one.
        measured: how much an evaluation measures, by name; empty before the first one.
        ended: minutes of the budget that ended training; 0 while it continues.
        first: number of conversations that training began with; `None` before.
    """

    def __init__(
        self, minutes: float, out: Path | None = None, answers: float = 0.0, began: float | None = None
    ) -> None:
        self._file = None if out is None else out / "clock.json"
        kept = {} if self._file is None else read_kept(self._file, "delete it, and the time of the run begins again")
        self.minutes, self.spent, self.first = minutes, float(kept.get("seconds", 0.0)), kept.get("first")
        self.answer_minutes = answers * minutes
        self.evaluation_seconds: float | None = None
        self.measured: dict[str, int] = {}
        self.ended = 0.0
        self._begin = (time.monotonic() if began is None else began) - self.spent
        self._step, self._since = math.inf, self.spent  # seconds of the shortest step; when this one began
        self._training = out is None

    def answer_seconds(self) -> float | None:
        """Returns the seconds left before training should begin, perhaps below 0; `None` for no limit, as later on."""
        if self._training:
            return None
        if self.answer_minutes:
            self._keep(time.monotonic() - self._begin)
        return 60.0 * self.answer_minutes - self.spent

    def begin_training(self, first: int, stored: Mapping[str, Any]) -> None:
        """Leaves what is left of the minutes to training, which begins with `first` conversations; see `resume`."""
        if self._file is not None:
            self.answer_seconds()
            self.first = first if self.first is None else self.first
            self._keep(self.spent)
            self.minutes = max(self.minutes - self.spent / 60, _LEAST_TRAINING * self.minutes)
        self._training = True
        self.resume(stored)

    def resume(self, stored: Mapping[str, Any]) -> None:
        """Resumes training by the attributes in a checkpoint, which are empty for a new run."""
        for name, value in {"spent": 0.0, **stored}.items():
            setattr(self, name, value)
        self._begin, self._since = time.monotonic() - self.spent, self.spent

    def _keep(self, seconds: float) -> None:
        assert self._file is not None
        self.spent = seconds
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"seconds": seconds, "first": self.first})

    @property
    def limited(self) -> bool:
        return math.isfinite(self.minutes)

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
    def _left(self) -> float:
        """Seconds left for training, without those for another step, the last evaluation and what comes after it."""
        step = self._step if math.isfinite(self._step) else 0.0
        reserve = step + self._evaluation + min(_FINISH * 60.0 * self.minutes, _FINISH_SECONDS)
        return 60.0 * self.minutes - reserve - self.spent

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        return min(1.0, self.spent / max(self.spent + self._left, 1e-9))

    def scale(self) -> float:
        """Returns the current factor of the peak learning rate."""
        if self.progress < _WARMUP:
            return max(self.progress / _WARMUP, 1e-3)
        return 0.5 * (1.0 + math.cos(math.pi * (self.progress - _WARMUP) / (1.0 - _WARMUP)))

    def within(self, items: Iterable[Item], name: str, seconds: float) -> Iterator[Item]:
        """Yields what an evaluation has time for, at least one item.

        The first time it yields items until `seconds` have passed, later as many again, so that the figures of all
        evaluations are comparable. `name` identifies the items.
        """
        known, begin, done = self.measured.get(name), time.monotonic(), 0
        for item in items:
            over = [done > 0 and time.monotonic() - begin >= seconds if known is None else done >= known]
            if (broadcast_object_list(over) if known is None else over)[0]:
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
        return {"args": {"minutes": self.minutes}, "attributes": {name: getattr(self, name) for name in names}}


_STEPS = {"loss": "loss {:.3f}", "accuracy_1": "first depth right {:.0%}", "tokens_per_second": "{:,.0f} tokens/s"}
_HELD_OUT = {
    "eval_tau": "tau {:.2f}",
    "eval_loss": "held-out loss {:.3f}",
    "eval_accuracy_1": "first depth right {:.0%}",
    "eval_parity": "parity {:.4f}",
}


def figures_in_words(logs: Mapping[str, float]) -> str:
    """Formats the figures of a log entry, which is of training or of an evaluation."""
    words = _STEPS if "loss" in logs else _HELD_OUT
    known = {name: float(logs.get(name, math.nan)) for name in words}
    return ", ".join(text.format(known[name]) for name, text in words.items() if not math.isnan(known[name]))


class TrainingProgress(TrainerCallback):
    """Reports to a stage how far the Trainer is, in minutes with a time budget, and its last figures, tau included."""

    def __init__(self, stage: Stage, budget: TimeBudget | None = None) -> None:
        self._stage, self._budget = stage, budget

    def _note(self, state: Any, *further: str) -> str:
        history: list[dict[str, Any]] = state.log_history[::-1]  # that of earlier runs included
        loss, tau = (next((each for each in history if name in each), None) for name in ("loss", "eval_tau"))
        found = [f"step {state.global_step:,}"] * (self._budget is not None) + [figures_in_words(loss) if loss else ""]
        found += [f"tau {tau['eval_tau']:.2f} at step {tau['step']:,}"] if tau else []
        return ", ".join(filter(None, [*found, *further]))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._budget is None:
            self._stage.start(state.max_steps, state.global_step)
        else:
            self._stage.start(self._budget.minutes, self._budget.spent / 60)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step if self._budget is None else self._budget.spent / 60
        self._stage.advance(done, self._note(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stage.advanced and self._stage.total is not None and self._stage.done < self._stage.total:
            why = "ended early" if self._budget is None else "the rest is for the last evaluation and saving"
            self._stage.advance(self._stage.done, self._note(state, why))
