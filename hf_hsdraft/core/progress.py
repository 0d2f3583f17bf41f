"""What commands and runs say while they work: lines, and stages of work, as bars in a terminal and lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from .forks import new_lock

EVERY, EVERY_OF_STAGES = 5.0, 20.0  # seconds between two lines where no terminal shows progress
errors = Console(stderr=True)


def tell(line: str) -> None:
    """Prints a line on standard error as it is, without markup, colours and line breaks."""
    errors.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _beating(beat: Callable[[], object], every: float) -> Iterator[None]:
    """Calls `beat` every so many seconds within, on another thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every):
            beat()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def working(doing: str) -> Iterator[None]:
    """Says what takes a while: beside a spinner in a terminal, elsewhere by a line at once and every few seconds."""
    if errors.is_terminal:
        from rich.live import Live
        from rich.spinner import Spinner

        # Not `Console.status`, which replaces the standard streams: libraries keep those that they find when imported.
        with Live(Spinner("dots", doing), console=errors, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield
        return
    began = time.monotonic()
    tell(doing)
    with _beating(lambda: tell(f"{doing}: {time.monotonic() - began:.0f} s"), EVERY):
        yield


class Stage:
    """A part of a run's work.

    Args:
        name: what is done.
        unit: what is counted.
        total: amount of the whole; `None` while it is unknown.
        done: what an earlier run has done.
        show: called after each change.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        total: float | None = None,
        done: float = 0,
        show: Callable[[Stage], object] = lambda stage: None,
    ) -> None:
        self.name, self.unit, self.note, self.advanced = name, unit, "", False
        self.total, self.done, self._known = total, done, done
        self._show, self._begin = show, time.monotonic()

    def start(self, total: float, done: float = 0) -> None:
        """Sets the amount of a stage that was opened before it was known."""
        self.total, self.done, self._known, self._begin = total, done, done, time.monotonic()
        self._show(self)

    def advance(self, done: float, note: str | None = None) -> None:
        """Sets how much is done, and the note unless it is `None`."""
        self.done, self.advanced = done, True
        self.note = self.note if note is None else note
        self._show(self)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def seconds_left(self) -> float | None:
        """Estimates the seconds left by the mean pace so far; `None` if there is no pace yet."""
        if self.total is None or self.done <= self._known:
            return None
        return self.elapsed / (self.done - self._known) * max(self.total - self.done, 0.0)

    def line(self, ended: bool = False) -> str:
        of = "" if self.total is None else f"/{_amount(self.total)}"
        text = f"{self.name}: {_amount(self.done)}{of} {self.unit}" + (f", {self.note}" if self.note else "")
        if ended:
            return f"{text}; took {span(self.elapsed)}"
        left = self.seconds_left()
        return text if not left or left < 0.5 else f"{text}; about {span(left)} left"


class Reporter:
    """Reports the progress of a run. It is called with a line; `stage` is for work that takes a while.

    Args:
        say: takes a line.
        every: least number of seconds between two lines of a stage. Its first and its last line always come.
        console: a terminal, which shows open stages as bars instead; `None` for lines.
    """

    def __init__(
        self, say: Callable[[str], object] = print, every: float = EVERY_OF_STAGES, console: Console | None = None
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._say, self._every, self._terminal, self._open = say, every, console is not None, list[Stage]()
        columns = BarColumn(), TextColumn("{task.description}", markup=False)
        self._bars = Progress(*columns, console=console, transient=True, disable=console is None)

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
        bar = self._bars.add_task(name, total=total, visible=total != 0)
        said, lock = -math.inf, new_lock()

        def show(stage: Stage) -> None:
            nonlocal said
            with lock:
                if self._terminal:
                    self._bars.update(bar, description=stage.line(), completed=stage.done, total=stage.total)
                elif time.monotonic() - said >= self._every:
                    said = time.monotonic()
                    self._say(stage.line())

        def beat() -> None:  # one batch of answers may take minutes
            waits = stage.advanced or (stage.total is not None and stage.done < stage.total)
            if waits and self._open[-1:] == [stage]:  # not beside a stage within it
                show(stage)

        stage = Stage(name, unit, total, done, show)
        self._open.append(stage)
        self._bars.start()
        try:
            with _beating(beat, self._every):
                if total is not None and done < total:
                    show(stage)
                yield stage
        finally:
            self._open.remove(stage)
            self._bars.remove_task(bar)
            if not self._bars.task_ids:
                self._bars.stop()
        if stage.advanced:
            self._say(stage.line(ended=True))


def span(seconds: float) -> str:
    """Formats a duration with about two digits."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _amount(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
