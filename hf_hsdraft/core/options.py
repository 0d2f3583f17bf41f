"""An option that one family of drafters, or one rule of verification, has beside those that all have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A drafting option of somebody's own. It lies on `drafter.generation_config`, and is saved with the others.

    Attributes:
        name: attribute of `drafter.generation_config`.
        default: value where nobody says otherwise.
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
        """Returns the value.

        Raises:
            ValueError: it cannot be used.
        """
        if not self.check(value):
            raise ValueError(f"{self.name}={value!r} is invalid: expected {self.expected}")
        return value
