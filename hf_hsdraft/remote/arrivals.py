"""Predicts when the texts that were answered will send their next draft."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from ..core.tuning import TUNING
from .verified_text import VerifiedText


@dataclass
class _Habit:
    """When a text was answered (`None` while it waits for an answer), and the running mean of its seconds away."""

    answered: float | None = None
    away: float | None = None


class Arrivals:
    """Notes how long each text is away between an answer and its next draft."""

    def __init__(self) -> None:
        self._habits: weakref.WeakKeyDictionary[VerifiedText, _Habit] = weakref.WeakKeyDictionary()

    def answered(self, text: VerifiedText, now: float) -> None:
        self._habits.setdefault(text, _Habit()).answered = now

    def asked(self, text: VerifiedText, now: float) -> None:
        habit = self._habits.setdefault(text, _Habit())
        if habit.answered is not None:
            away = now - habit.answered
            habit.away = away if habit.away is None else habit.away + TUNING.newest_away * (away - habit.away)
            habit.answered = None

    def ended(self, text: VerifiedText) -> None:
        self._habits.pop(text, None)

    @property
    def away(self) -> int:
        """Number of texts that were answered and have not sent their next draft."""
        return sum(habit.answered is not None for habit in list(self._habits.values()))

    def next(self, now: float, until: float) -> float | None:
        """Returns when a batch should stop waiting for another text, at most `until`; `None` if none is expected.

        Texts without a measured habit, and those that are late, are not waited for.
        """
        known = []
        for habit in list(self._habits.values()):
            if habit.answered is not None and habit.away is not None:
                late = habit.answered + TUNING.latest_away * habit.away + TUNING.late_slack
                if habit.answered + habit.away <= until and now < late:
                    known.append(min(late, until))
        return min(known, default=None)
