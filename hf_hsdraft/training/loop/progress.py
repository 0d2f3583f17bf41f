"""Progress reports of a run: lines, and stages of work.

In a terminal an open stage is a bar. Elsewhere it is a line now and then, so that a log stays readable.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from rich.console import Console

    from .budget import TimeBudget

EVERY = 20.0  # seconds
_PACES = 31  # last advances whose median pace estimates the time left


class Reporter:
    """Reports the progress of a run. It is called with a line; `stage` is for work that takes a while.

    Args:
        say: takes a line.
        every: least number of seconds between two lines of a stage. Its first and its last line always come.
        console: a terminal, which shows open stages as bars instead; `None` for lines.
    """

    def __init__(
        self, say: Callable[[str], object] = print, every: float = EVERY, console: Console | None = None
    ) -> None:
        self._say = say
        self._every = every
        self._bars = None if console is None else _Bars(console)

    @classmethod
    def of(cls, report: Callable[[str], object]) -> Reporter:
        """Wraps a function that takes lines; a reporter is returned as it is."""
        return report if isinstance(report, Reporter) else cls(report)

    def __call__(self, line: str) -> None:
        self._say(line)

    @contextlib.contextmanager
    def stage(self, name: str, unit: str, total: float | None = None, done: float = 0) -> Iterator[Stage]:
        """Opens a stage, whose last line is reported when the block ends without an error.

        `total` is `None` until `Stage.start` tells it; `done` was done by an earlier run.
        """
        stage = Stage(name, unit, total, done)
        said, lock, ended = -math.inf, threading.Lock(), threading.Event()

        def show() -> None:
            nonlocal said
            with lock:
                if self._bars is not None:
                    self._bars.show(stage)
                elif time.monotonic() - said >= self._every:
                    said = time.monotonic()
                    self._say(stage.line())

        def beat() -> None:
            while not ended.wait(self._every):
                if stage.started:
                    show()

        stage.show = show
        beating = threading.Thread(target=beat, daemon=True)  # one batch of answers may take minutes
        beating.start()
        try:
            if total is not None and done < total:
                show()
            yield stage
        finally:
            ended.set()
            beating.join()
            if self._bars is not None:
                self._bars.remove(stage)
        if stage.advanced:
            self._say(stage.line(ended=True))


class Stage:
    """A part of a run's work.

    Attributes:
        name: what is done.
        unit: what is counted.
        total: amount of the whole; `None` while it is unknown.
        note: text added to the line.
        further: seconds that will be spent on work that is not counted.
        also: description of further work of unknown duration; empty for none.
    """

    def __init__(self, name: str, unit: str, total: float | None = None, done: float = 0) -> None:
        self.name, self.unit, self.total, self.done = name, unit, total, done
        self.note = ""
        self.advanced = False
        self.show: Callable[[], None] = lambda: None
        self.further, self.also = 0.0, ""
        self._begin = self._since = time.perf_counter()
        self._paces, self._most = deque[float](maxlen=_PACES), 0.0  # seconds for one; most that came together

    @property
    def started(self) -> bool:
        """Whether there is anything to report."""
        return self.total is not None and (self.advanced or self.done < self.total)

    def start(self, total: float, done: float = 0) -> None:
        """Sets the amount of a stage that was opened before it was known."""
        self.total, self.done = total, done
        self._begin = self._since = time.perf_counter()
        self.show()

    def advance(self, done: float, note: str | None = None) -> None:
        """Sets how much is done, and the note unless it is `None`."""
        now = time.perf_counter()
        if (step := done - self.done) > 0:
            self._paces.append((now - self._since) / step)
            self._most = max(self._most, step)
        self._since, self.done, self.advanced = now, done, True
        self.note = self.note if note is None else note
        self.show()

    def leave_out(self, seconds: float) -> None:
        """Excludes the seconds just spent on other work from the pace."""
        self._since += seconds

    def seconds_left(self) -> float | None:
        """Estimates the seconds left at the median of the last paces; `None` if there is no pace yet.

        Between two advances it falls as time passes. Where one takes longer than expected, it grows with that pace.
        """
        if self.total is None or not self._paces:
            return None
        passed, left = time.perf_counter() - self._since, max(self.total - self.done, 0.0)
        timed = self.unit == "minutes"
        pace = 60.0 if timed else max(statistics.median(self._paces), passed / self._most)
        return max(pace * left - passed, 0.0) + self.further

    def line(self, ended: bool = False) -> str:
        of = "" if self.total is None else f"/{_amount(self.total)}"
        text = f"{self.name}: {_amount(self.done)}{of} {self.unit}" + (f", {self.note}" if self.note else "")
        left = self.seconds_left()
        if ended:
            return f"{text}; took {span(time.perf_counter() - self._begin)}"
        return text if left is None else f"{text}; about {span(left)}{self.also and f' and {self.also}'} left"


class TrainingProgress(TrainerCallback):
    """Reports to a stage how far the Trainer is: in minutes with a time budget, in steps without one."""

    def __init__(self, stage: Stage, budget: TimeBudget | None = None) -> None:
        self._stage = stage
        self._budget = budget
        self._figures = ""
        self._evaluation: float | None = None  # seconds of the latest one

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._budget is None:
            self._stage.start(state.max_steps, state.global_step)
        else:
            self._stage.start(self._budget.minutes, self._budget.spent / 60)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._budget is None:
            self._expect(state, state.global_step - 1)
            self._stage.advance(state.global_step, self._figures)
        else:
            note = ", ".join(filter(None, [f"step {state.global_step:,}", self._figures]))
            self._stage.advance(self._budget.spent / 60, note)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._budget is None and metrics and "eval_seconds" in metrics:
            self._evaluation = metrics["eval_seconds"]
            self._stage.leave_out(self._evaluation)
            self._expect(state, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stage.advanced and self._stage.total is not None and self._stage.done < self._stage.total:
            why = "ended early" if self._budget is None else "the rest is for the last evaluation and saving"
            self._stage.advance(self._stage.done, ", ".join(filter(None, [self._stage.note, why])))

    def _expect(self, state: Any, evaluated: int) -> None:
        """Tells the stage which evaluations are still to come after step `evaluated`."""
        every = int(getattr(state, "eval_steps", 0) or 0)
        left = state.max_steps // every - evaluated // every if every else 0
        unknown = left > 0 and self._evaluation is None
        self._stage.also = f"{left} evaluation{'s' * (left > 1)}" if unknown else ""
        self._stage.further = left * (self._evaluation or 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._figures = figures_in_words(logs)


_TRAINING = {"loss": "loss {:.3f}", "accuracy_1": "first depth right {:.0%}", "tokens_per_second": "{:,.0f} tokens/s"}
_EVALUATION = {
    "eval_tau": "tau {:.2f}",
    "eval_loss": "held-out loss {:.3f}",
    "eval_accuracy_1": "first depth right {:.0%}",
    "eval_parity": "parity {:.4f}",
}


def figures_in_words(logs: Mapping[str, float]) -> str:
    """Formats the figures of a log entry, which is of training or of an evaluation."""
    words = _TRAINING if "loss" in logs else _EVALUATION
    return ", ".join(text.format(float(logs[name])) for name, text in words.items() if name in logs)


def span(seconds: float) -> str:
    """Formats a duration with about two digits."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _amount(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


class _Bars:
    """A bar for each open stage, below the lines of a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._shown: dict[Stage, Any] = {}
        self._progress = Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=True)

    def show(self, stage: Stage) -> None:
        from rich.markup import escape

        if stage not in self._shown:
            self._progress.start()
            self._shown[stage] = self._progress.add_task("", total=None)
        self._progress.update(
            self._shown[stage], description=escape(stage.line()), completed=stage.done, total=stage.total
        )

    def remove(self, stage: Stage) -> None:
        if stage in self._shown:
            self._progress.remove_task(self._shown.pop(stage))
        if not self._shown:
            self._progress.stop()
