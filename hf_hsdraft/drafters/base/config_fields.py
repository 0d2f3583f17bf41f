"""Fields of a drafter's configuration, each declared once: its doc, its default and what it may be.

@described
@dataclass(frozen=True)
class MyConfig(PlainConfig):
    num_draft_steps: int = setting("greatest depth of a draft", 5, most=64)
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from ...core.checks import is_integer, is_number, short


@dataclass(frozen=True)
class Limit:
    """What a field may be. The greatest values that make sense are limits against typing errors and against files that
    want to exhaust a machine.

    Attributes:
        least, most: an integer from the one to the other; where `most` is a float, a number below it.
        among: one of these.
        optional: `None` too.
    """

    least: float = 1
    most: float | None = None
    among: Sequence[Any] = ()
    optional: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises a ValueError that names field, value and limit."""
        if value is None and self.optional:
            return
        if self.among:
            demand(value in self.among, name, value, f"expected one of {', '.join(map(str, self.among))}")
        elif isinstance(self.most, float):
            valid = is_number(value) and self.least <= value < self.most
            demand(valid, name, value, f"expected a number of {self.least:g} or more")
        elif self.most is not None:
            valid = is_integer(value) and self.least <= value <= self.most
            demand(valid, name, value, f"expected an integer from {self.least} to {self.most:,}")


def setting(
    doc: str,
    default: Any = MISSING,
    *,
    least: float = 1,
    most: float | None = None,
    among: Sequence[Any] = (),
    optional: bool = False,
    **further: Any,
) -> Any:
    """Declares a field; see `Limit`. `further` is as `dataclasses.field` takes it."""
    metadata = {"doc": doc, "limit": Limit(least, most, among, optional)}
    return dataclasses.field(default=default, metadata=metadata, **further)


def described(kind: Any) -> Any:
    """Adds the docs of its fields to the docstring of a class."""
    lines = ["", "Attributes:"]
    for each in dataclasses.fields(kind):
        if "doc" in each.metadata:
            text = f"{each.name}: {each.metadata['doc']}."
            lines += textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="        ")
    kind.__doc__ = f"{kind.__doc__.rstrip()}\n    " + "\n    ".join(lines) + "\n    "
    return kind


def check_fields(config: Any) -> None:
    """Raises a ValueError for the first field that is beyond its limit."""
    for each in dataclasses.fields(config):
        if "limit" in each.metadata:
            each.metadata["limit"].check(each.name, getattr(config, each.name))


def most_of(kind: Any, name: str) -> int:
    """Returns the greatest value of a field of a configuration class."""
    [limit] = [each.metadata["limit"] for each in dataclasses.fields(kind) if each.name == name]
    return int(limit.most)


def demand(valid: bool, name: str, value: Any, wanted: str) -> None:
    """Raises a ValueError about a field unless it is `valid`."""
    if not valid:
        raise ValueError(f"{name}={short(value)} is invalid: {wanted}")


class PlainConfig:
    """A configuration that is a dataclass, with what reports of training (TensorBoard, Weights & Biases) ask for."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name, those of nested dataclasses as dictionaries."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def to_json_string(self) -> str:
        """Returns the fields as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=dict) + "\n"
