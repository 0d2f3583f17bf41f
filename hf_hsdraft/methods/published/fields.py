"""Checked reading of foreign configurations: each field is checked when read, and unread switches are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...core.checks import Limit, few, is_integer, is_number, printable, short

REQUIRED: Any = object()  # default of a required field
_SINGLE = (str, int, float, bool)


class Fields:
    """Reads a JSON object field by field; absent and null fields count as missing. `place` names it in messages."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def checked(self, name: str, limit: Limit, default: Any = REQUIRED) -> Any:
        return self._checked(name, default, limit.valid, limit.wanted)

    def integer(self, name: str, default: Any = REQUIRED, least: int = 1, most: int = 2**31) -> Any:
        wanted = f"an integer from {least:,} to {most:,}"
        return self._checked(name, default, lambda value: is_integer(value) and least <= value <= most, wanted)

    def number(self, name: str, default: Any = REQUIRED, least: float = 0.0, most: float = 1e12) -> Any:
        """Returns a number above `least` and up to `most`."""
        wanted = f"a number above {least:g}, at most {most:g}"
        return self._checked(name, default, lambda value: is_number(value) and least < value <= most, wanted)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        return self._checked(name, default, lambda value: isinstance(value, bool), "true or false")

    def choice(self, name: str, allowed: Collection[Any], default: Any = REQUIRED) -> Any:
        wanted = f"one of {', '.join(map(str, allowed))}"
        return self._checked(name, default, lambda value: isinstance(value, _SINGLE) and value in allowed, wanted)

    def integers(self, name: str, default: Any = REQUIRED, least: int = 0, most: int = 2**31) -> Any:
        """Returns a non-empty list of integers."""

        def valid(value: Any) -> bool:
            in_range = isinstance(value, list) and all(is_integer(each) and least <= each <= most for each in value)
            return in_range and len(value) > 0

        return self._checked(name, default, valid, f"a list of integers from {least:,} to {most:,}")

    def table(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the `Fields` of a nested object."""
        found = self._checked(name, default, lambda value: isinstance(value, dict), "an object")
        return Fields(found, f"{self.place}, {name}") if isinstance(found, dict) else found

    def expect(self, name: str, *allowed: Any) -> None:
        """Raises a ValueError if a field has a value that is not supported here; it may be missing."""
        wanted = f"{' or '.join(map(short, allowed))}, as nothing else can be drafted with here"
        self._checked(name, None, lambda value: any(value == each for each in allowed), wanted)

    def ignore(self, *names: str) -> None:
        """Marks fields as irrelevant here."""
        self._read.update(names)

    def refuse_unread(self, changing: Mapping[str, Collection[Any]] | None = None) -> None:
        """Raises a ValueError for unread fields that may change what a drafter computes.

        These are all of value true, and those that are `changing`, except for the values given with each.
        """
        for name, neutral in (changing or {}).items():
            if name not in self._read:
                self.expect(name, *neutral)
        unread = sorted(name for name, value in self.values.items() if value is True and name not in self._read)
        if unread:
            raise ValueError(
                f"{printable(self.place)} has {few([f'{name}=true' for name in unread])}: this is not known here, and "
                "the drafter may compute something else than would be computed here"
            )

    def refuse_unread_numbers(self) -> None:
        """Raises a ValueError for unread fields with a number other than 0, in a table about a drafter alone."""
        numbers = {name: value for name, value in self.values.items() if is_number(value) and name not in self._read}
        if unread := few([f"{name}={short(value)}" for name, value in sorted(numbers.items()) if value]):
            raise ValueError(
                f"{printable(self.place)} has {unread}: this is not known here, and the drafter may compute something "
                "else than would be computed here"
            )

    def _checked(self, name: str, default: Any, valid: Any, wanted: str) -> Any:
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{printable(self.place)} has no {name}: expected {wanted}")
            return default
        if not valid(value):
            raise ValueError(f"{name}={short(value)} in {printable(self.place)} is invalid: expected {wanted}")
        return value
