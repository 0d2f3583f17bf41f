"""What batches are decided by: when texts that were answered come back, and what forwards cost."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

from ..core.tuning import TUNING
from .fleet import fitted_line
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


@dataclass
class BatchStatistics:
    """Totals since the thread began."""

    forwards: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # number of forwards by number of texts
    tokens: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    verify_seconds: float = 0.0  # of all verifying forwards, updating the caches included
    # columns, columns_squared, columns_seconds: sums over forwards, for `fitted_line`; columns are texts times the
    # nodes of the largest tree
    columns: int = 0
    columns_squared: int = 0
    columns_seconds: float = 0.0
    failures: int = 0  # number of prompts and trees that could not be read

    def add(self, texts: int, nodes: int, tokens: int, seconds: float) -> None:
        columns = texts * nodes
        self.forwards += 1
        self.sizes[texts] = self.sizes.get(texts, 0) + 1
        self.tokens += tokens
        self.verify_seconds += seconds
        self.columns += columns
        self.columns_squared += columns**2
        self.columns_seconds += columns * seconds

    def worthwhile_columns(self) -> float:
        """Returns how many columns a forward should have at most, by the costs measured so far."""
        if self.forwards < TUNING.costs_known:
            return math.inf
        sums = self.columns, self.columns_squared, self.verify_seconds, self.columns_seconds
        fixed, column = fitted_line([self.forwards, *sums])
        return TUNING.drafts_share * fixed / column if column else math.inf
