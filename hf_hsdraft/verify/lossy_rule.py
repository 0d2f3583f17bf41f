"""A lossy rule as text: `fly+fly_window=2`, on command lines and in tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .registry import VERIFIERS, is_lossy

BESIDE = ("ngram_continuation", "num_assistant_tokens", "tree_size")  # options of drafts, allowed beside a rule's


@dataclass(frozen=True)
class Rule:
    """A lossy rule with its options, as a caller writes it."""

    name: str  # of `VERIFIERS`
    options: dict[str, Any] = field(default_factory=dict)  # only those set, of the rule and of `BESIDE`

    @property
    def text(self) -> str:
        """The rule as `parse` reads it."""
        return "+".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def drafts(self) -> dict[str, Any]:
        """The set options that concern drafts."""
        return {name: value for name, value in self.options.items() if name in BESIDE}

    @property
    def threshold(self) -> str:
        """Name of the option that controls how much is accepted."""
        return VERIFIERS[self.name].own_options[0].name

    @property
    def value(self) -> float:
        return self.options.get(self.threshold, VERIFIERS[self.name].own_options[0].default)

    @property
    def is_published(self) -> bool:
        return all(self.options.get(name, default) == default for name, default in self.defaults.items())

    @property
    def defaults(self) -> dict[str, Any]:
        """The rule's options, as published."""
        return {option.name: option.default for option in VERIFIERS[self.name].own_options}

    @property
    def all_options(self) -> dict[str, Any]:
        """All options that a drafter gets for this rule, unset ones included."""
        return {"verification": self.name, **self.defaults, **self.options}

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Reads `fly` or `fly+fly_entropy=0.5+fly_window=2`. Raises a ValueError for unknown names and bad values."""
        name, *parts = text.strip().split("+")
        lossy = [each for each in VERIFIERS if is_lossy(each)]
        if name not in lossy:
            raise ValueError(f"{name!r} is no lossy rule: expected some of {', '.join(lossy)}")
        own, options = {option.name: option for option in VERIFIERS[name].own_options}, {}
        for part in parts:
            option, sign, value = part.partition("=")
            if option in BESIDE and value.isdecimal():
                options[option] = int(value)
                continue
            if option not in own or not sign:
                known = ", ".join([*own, *BESIDE])
                raise ValueError(f"{text!r}: {name} has no option {part!r}: expected some of {known}, as a=b")
            try:
                number = float(value)
            except ValueError:
                raise ValueError(f"{text!r}: {option}={value} is invalid: expected {own[option].expected}") from None
            whole = isinstance(own[option].default, int) and number.is_integer()
            options[option] = own[option].checked(int(number) if whole else number)
        return cls(name, options)

    def at(self, value: float) -> Rule:
        """Returns the rule with another threshold. Raises a ValueError if that is out of range."""
        VERIFIERS[self.name].own_options[0].checked(value)
        return replace(self, options={**self.options, self.threshold: value})
