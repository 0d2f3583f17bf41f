"""A drafting option that only one family of drafters or one verification rule has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A drafting option that is set on `drafter.generation_config` and saved with the others."""

    name: str
    default: Any
    check: Callable[[Any], bool]  # returns whether a value may be used
    expected: str  # what `check` wants, for messages: "a number from 0 to 1"
    doc: str = ""  # what it does, in a sentence

    def checked(self, value: Any) -> Any:
        """Returns the value, or raises a ValueError if it cannot be used."""
        if not self.check(value):
            raise ValueError(f"{self.name}={value!r} is invalid: expected {self.expected}")
        return value
