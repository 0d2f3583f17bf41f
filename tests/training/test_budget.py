"""Training by the clock: what fits into the time, and what is left out so that it fits."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from hf_hsdraft.training.loop import budget as module
from hf_hsdraft.training.loop.budget import TimeBudget


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


def resumed(minutes: float, stored: dict) -> TimeBudget:
    budget = TimeBudget(minutes)
    budget.resume(stored)
    return budget


def step(budget: TimeBudget, due: bool = False) -> SimpleNamespace:
    """Ends a step of training, after which an evaluation may be due."""
    control = SimpleNamespace(should_evaluate=due, should_save=due, should_training_stop=False)
    budget.on_step_end(None, None, control)
    return control


def test_training_stops_early_enough_for_a_last_evaluation_and_the_saving(clock):
    budget = TimeBudget(10.0)
    step(budget)  # took no time
    clock.now += 100.0
    assert not step(budget).should_training_stop
    budget.on_evaluate(None, None, None, metrics={"eval_seconds": 30.0})
    clock.now = 1000.0 + 600 - 30 - 20 - 1
    assert not step(budget).should_training_stop and budget.ended == 0.0
    clock.now += 1.0
    control = step(budget)
    assert control.should_training_stop and control.should_evaluate and control.should_save
    assert budget.ended == 10.0 and budget.progress == 1.0 and budget.scale() == pytest.approx(0.0, abs=1e-6)


def test_training_stops_where_another_step_would_not_fit(clock):
    budget = TimeBudget(10.0)
    budget.on_evaluate(None, None, None, metrics={"eval_seconds": 30.0})
    for _ in range(4):
        clock.now += 109.0
        assert not step(budget).should_training_stop
    clock.now += 109.0
    assert step(budget).should_training_stop and budget.spent == 545.0  # of 550
    budget = TimeBudget(10.0)
    clock.now += 200.0
    step(budget)
    clock.now += 200.0
    assert step(budget).should_training_stop  # 400 seconds; another 200 and the evaluation do not fit
    assert budget.remaining == 200.0
    clock.now += 300.0
    assert budget.remaining == 0.0


def test_an_evaluation_shortly_before_the_last_one_is_left_out(clock):
    budget = TimeBudget(10.0)
    step(budget)
    budget.on_evaluate(None, None, None, metrics={"eval_seconds": 30.0})
    clock.now = 1000.0 + 600 - 30 - 20 - 31
    assert step(budget, due=True).should_evaluate
    clock.now += 2.0
    control = step(budget, due=True)
    assert not (control.should_evaluate or control.should_save or control.should_training_stop)


def test_before_the_first_evaluation_its_greatest_time_is_kept_free(clock):
    budget = TimeBudget(2.0)
    step(budget)
    clock.now += 120 - 15 - 12 - 1  # an eighth, and a tenth for saving and pictures
    assert not step(budget).should_training_stop
    clock.now += 1.0
    assert step(budget).should_training_stop


def test_evaluations_measure_as_much_as_the_first_one_had_time_for(clock):
    budget = TimeBudget(10.0)

    def measured(seconds_each: float) -> list[int]:
        found = []
        for item in budget.within(range(9), "prompts", 10.0):
            found.append(item)
            clock.now += seconds_each
        return found

    assert measured(4.0) == [0, 1, 2]  # after 12 seconds the time is over
    assert measured(0.1) == measured(100.0) == [0, 1, 2]
    budget = resumed(20.0, budget.state()["attributes"])
    assert measured(0.1) == [0, 1, 2]
    budget = TimeBudget(10.0)
    assert measured(100.0) == [0]  # at least one
    budget = TimeBudget(10.0)
    assert measured(0.1) == list(range(9))


def test_a_resumed_budget_goes_on_with_the_minutes_that_are_left(clock):
    budget = TimeBudget(10.0)
    clock.now += 300.0
    step(budget)
    stored = budget.state()["attributes"]
    clock.now += 5000.0  # the machine was off
    budget = resumed(10.0, stored)
    clock.now += 60.0
    step(budget)
    assert budget.spent == 360.0
    assert resumed(10.0, {"spent": 120.0}).spent == 120.0  # all that earlier versions noted


def test_the_learning_rate_rises_and_falls_over_the_time_of_training(clock):
    budget = TimeBudget(10.0)
    budget.on_evaluate(None, None, None, metrics={"eval_seconds": 30.0})
    training = 600.0 - 30 - 20
    for share, factor in ((0.025, 0.5), (0.05, 1.0), (0.525, 0.5), (1.0, 0.0)):
        budget.spent = share * training
        assert math.isclose(budget.scale(), factor, abs_tol=1e-6)


def test_time_is_divided_and_kept_over_interruptions(clock, tmp_path):
    begun = TimeBudget(10, tmp_path, answers=0.3, began=970.0)
    clock.now += 149
    assert begun.answer_seconds() == 1.0  # 179 of 600 seconds are over
    clock.now += 1000.0  # killed
    again = TimeBudget(10, tmp_path, answers=0.3)
    clock.now += 51.0
    assert again.answer_seconds() == -50.0
    again.begin_training(24, {})
    assert again.minutes == pytest.approx(10 - 230 / 60) and again.answer_seconds() is None and again.spent == 0.0
    later = TimeBudget(20, tmp_path)
    clock.now += 1000.0  # training's clock counts from here on
    assert later.answer_seconds() <= 0.0 and later.first == 24
    later.begin_training(99, {"spent": 60.0})
    assert later.minutes == pytest.approx(20 - 230 / 60) and later.first == 24 and later.spent == 60.0


def test_training_gets_a_part_whatever_came_before(clock, tmp_path):
    budget = TimeBudget(10, tmp_path, answers=0.2, began=clock.now - 5000.0)
    budget.begin_training(1, {})
    assert budget.minutes == pytest.approx(1.0)
