"""For which texts a verifying server waits."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("msgpack")

from hf_hsdraft.remote.batch_timing import Arrivals


class Text:
    """Stands for a text; only its identity is used."""


def with_habit(arrivals: Arrivals, away: float) -> Text:
    """A text that was answered at 0 and came back after some seconds."""
    text = Text()
    arrivals.answered(text, 0.0)
    arrivals.asked(text, away)
    return text


def test_a_text_is_waited_for_that_comes_back_in_time() -> None:
    arrivals = Arrivals()
    soon, late = with_habit(arrivals, 0.02), with_habit(arrivals, 0.5)
    assert arrivals.next(1.0, 2.0) is None and arrivals.away == 0  # both have asked
    arrivals.answered(late, 1.0)
    assert arrivals.next(1.0, 1.1) is None and arrivals.away == 1  # it comes after that
    arrivals.answered(soon, 1.0)
    known = arrivals.next(1.0, 1.1)
    assert known is not None and 1.02 < known < 1.04
    assert arrivals.next(1.05, 1.1) is None  # it is late: nobody waits for it any more
    assert arrivals.next(1.0, 1.021) == 1.021  # no longer than asked for


def test_nothing_is_expected_of_new_texts_and_of_ended_ones() -> None:
    arrivals, new = Arrivals(), Text()
    arrivals.answered(new, 0.0)
    assert arrivals.next(0.0, 9.0) is None and arrivals.away == 1
    old = with_habit(arrivals, 0.1)
    arrivals.answered(old, 1.0)
    assert arrivals.next(1.0, 2.0) is not None
    arrivals.ended(old)
    assert arrivals.next(1.0, 2.0) is None
    del new
    gc.collect()
    assert arrivals.away == 0  # a text that is forgotten is not waited for


def test_habits_follow_the_last_rounds() -> None:
    arrivals = Arrivals()
    text = with_habit(arrivals, 0.5)
    for start in range(1, 12):
        arrivals.answered(text, float(start))
        arrivals.asked(text, start + 0.01)
    arrivals.answered(text, 20.0)
    known = arrivals.next(20.0, 20.1)
    assert known is not None and known < 20.06
