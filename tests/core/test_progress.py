"""What a run says of its progress: lines now and then, or bars in a terminal."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from hf_hsdraft.core import progress
from hf_hsdraft.core.progress import Reporter, Stage, span
from hf_hsdraft.training.loop.budget import TrainingProgress


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_lines_come_now_and_then_with_the_time_that_is_left(monkeypatch):
    clock, said = Clock(monkeypatch), []
    with Reporter(said.append, every=20.0).stage("reading", "files", 10) as stage:
        for done in range(1, 9):
            clock.now += 9.0
            stage.advance(done, f"{done} good")
    assert said == [
        "reading: 0/10 files",
        "reading: 3/10 files, 3 good; about 63 s left",
        "reading: 6/10 files, 6 good; about 36 s left",
        "reading: 8/10 files, 8 good; took 72 s",
    ]


def test_what_an_earlier_run_did_counts_as_done_and_not_as_pace(monkeypatch):
    clock, said = Clock(monkeypatch), []
    with Reporter(said.append, every=20.0).stage("reading", "files", 10, done=6) as stage:
        clock.now += 30.0
        stage.advance(7)
    assert said == ["reading: 6/10 files", "reading: 7/10 files; about 90 s left", "reading: 7/10 files; took 30 s"]
    said.clear()
    with Reporter(said.append).stage("reading", "files", 10, done=10):
        pass  # there was nothing to do
    assert not said


@pytest.mark.parametrize("budget", [None, SimpleNamespace(minutes=2.0, spent=60.0)])
def test_training_that_ends_early_says_why(budget):
    stage, state = Stage("training", "steps"), SimpleNamespace(max_steps=40, global_step=7, log_history=[])
    told = TrainingProgress(stage, budget)
    for event in (told.on_train_begin, told.on_step_end, told.on_train_end):
        event(None, state, None)
    expected = "7/40 steps, ended early" if budget is None else "the rest is for the last evaluation and saving"
    assert expected in stage.line(ended=True)


def test_training_shows_its_last_figures_and_the_last_tau():
    figures = [{"eval_tau": 1.5, "step": 2}, {"loss": 2.0, "step": 4}, {"eval_tau": 1.75, "step": 4}]
    stage, state = Stage("training", "steps"), SimpleNamespace(max_steps=40, global_step=7, log_history=figures)
    TrainingProgress(stage).on_step_end(None, state, None)
    assert stage.note == "loss 2.000, tau 1.75 at step 4"


def test_a_stage_that_fails_does_not_say_that_it_ended():
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), Reporter(said.append).stage("reading", "files", 2) as stage:
        stage.advance(1)
        raise KeyboardInterrupt
    assert said == ["reading: 0/2 files"]


def test_a_step_that_takes_long_is_not_silence():
    said: list[str] = []
    with Reporter(said.append, every=0.01).stage("answering", "prompts", 2) as stage:
        end = time.monotonic() + 10.0
        while len(said) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        stage.advance(2)
    assert said[:3] == ["answering: 0/2 prompts"] * 3 and said[-1].startswith("answering: 2/2 prompts; took")


def test_a_terminal_shows_bars_and_keeps_the_last_lines():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    reporter = Reporter(lambda line: console.print(line, markup=False, highlight=False), console=console)
    with reporter.stage("training", "steps", 4) as outer, reporter.stage("evaluating", "[prompts]", 2) as inner:
        outer.advance(1)
        inner.advance(2)
    text = file.getvalue()
    assert "\u2501" in text  # a bar
    assert text.count("evaluating: 2/2 [prompts]; took") == text.count("training: 1/4 steps; took") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5940.0, "99 min"), (7500.0, "2 h 5 min")]
)
def test_times_are_short(seconds, text):
    assert span(seconds) == text
