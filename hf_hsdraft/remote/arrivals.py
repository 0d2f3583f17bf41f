"""When the texts that were answered will ask again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from ..core.tuning import TUNING
from .verified_text import VerifiedText


@dataclass
class _Habit:
    """What is known of a text: when it was answered, `None` while it waits itself, and how long it is away."""

    answered: float | None = None
    away: float | None = None


class Arrivals:
    """Notes how long each text is away between an answer and its next draft."""

    def __init__(self) -> None:
        self._habits: weakref.WeakKeyDictionary[VerifiedText, _Habit] = weakref.WeakKeyDictionary()

    def answered(self, text: VerifiedText, now: float) -> None:
        """A text was answered, and goes on."""
        self._habits.setdefault(text, _Habit()).answered = now

    def asked(self, text: VerifiedText, now: float) -> None:
        """A draft of a text has come."""
        habit = self._habits.setdefault(text, _Habit())
        if habit.answered is not None:
            away = now - habit.answered
            habit.away = away if habit.away is None else habit.away + TUNING.newest_away * (away - habit.away)
            habit.answered = None

    def ended(self, text: VerifiedText) -> None:
        """A text asks no more."""
        self._habits.pop(text, None)

    @property
    def away(self) -> int:
        """Number of texts that were answered and have not asked again."""
        return sum(habit.answered is not None for habit in list(self._habits.values()))

    def next(self, now: float, until: float) -> float | None:
        """Returns when it is known whether another text asks by a time; `None` where none is likely to.

        Texts of which nothing is known yet, and those that are late, are not waited for.
        """
        known = []
        for habit in list(self._habits.values()):
            if habit.answered is not None and habit.away is not None:
                late = habit.answered + TUNING.latest_away * habit.away + TUNING.late_slack
                if habit.answered + habit.away <= until and now < late:
                    known.append(min(late, until))
        return min(known, default=None)
