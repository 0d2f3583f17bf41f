"""A drafting option that only one family of drafters or one verification rule has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A drafting option that is set on `drafter.generation_config` and saved with the others.

    Attributes:
        check: returns whether a value may be used.
        expected: what `check` wants, for messages: "a number from 0 to 1".
        doc: what the option does, in a sentence.
    """

    name: str
    default: Any
    check: Callable[[Any], bool]
    expected: str
    doc: str = ""

    def checked(self, value: Any) -> Any:
        """Returns the value, or raises a ValueError if it cannot be used."""
        if not self.check(value):
            raise ValueError(f"{self.name}={value!r} is invalid: expected {self.expected}")
        return value
