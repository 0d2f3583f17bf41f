"""Drafting options: those of all drafters, of one family, or of one verification rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .checks import Limit, demand

_ANY = Limit(lambda value: True, "any value")


@dataclass(frozen=True)
class Option:
    """A drafting option that is set on `drafter.generation_config` and saved with the others."""

    name: str
    default: Any = None  # None also for what each family has its own default of
    limit: Limit | Callable[[Any], Limit] = _ANY  # of its values; a function of the drafter if they depend on it
    doc: str = ""  # what it does, in a sentence
    why_not_free: Callable[[Any], str] = lambda value: ""  # why a drafter's files may not set a value; "" if they may

    def checked(self, value: Any, drafter: Any = None) -> Any:
        """Returns the value, or raises a ValueError if it cannot be used."""
        limit = self.limit(drafter) if callable(self.limit) else self.limit
        demand(limit.valid(value), self.name, value, f"expected {limit.wanted}")
        return value
