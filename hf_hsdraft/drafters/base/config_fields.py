"""Fields of a drafter's configuration, each declared once: its doc, its default and what it may be.

num_draft_steps: int = setting("greatest depth of a draft", 5, integer(64))
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any

from ...core.checks import is_integer, is_number, short


@dataclass(frozen=True)
class Limit:
    """What a field may be.

    Attributes:
        valid: whether a value is right.
        wanted: what is, as in messages.
        most: the greatest value that makes sense. Beyond lie typing errors, and files that want to exhaust a machine.
    """

    valid: Callable[[Any], bool]
    wanted: str
    most: int = 0


def integer(most: int, least: int = 1) -> Limit:
    wanted = f"an integer from {least} to {most:,}"
    return Limit(lambda value: is_integer(value) and least <= value <= most, wanted, most)


def choice(*names: str) -> Limit:
    return Limit(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}")


POSITIVE = Limit(lambda value: is_number(value) and 0.0 < value < 1e12, "a positive number")


def setting(
    doc: str,
    default: Any = MISSING,
    limit: Limit | None = None,
    *,
    optional: bool = False,
    derived: Callable[[Any], Any] | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
    **further: Any,
) -> Any:
    """Declares a field.

    Args:
        doc: what it means.
        default: as in every dataclass; what is missing has to be given.
        limit: what it may be.
        optional: whether `None` is right whatever the limit.
        derived: makes it of the fields before it where it is `None`.
        convert: makes one type of what a file or a caller may give.
        further: as `dataclasses.field` takes it.
    """
    metadata = {"doc": doc, "limit": limit, "optional": optional, "derived": derived, "convert": convert}
    return dataclasses.field(default=default, metadata=metadata, **further)


def settings(kind: Any) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a configuration or of its class that `setting` declared, in their order."""
    return [each for each in dataclasses.fields(kind) if "doc" in each.metadata]


def check_field(each: dataclasses.Field[Any], value: Any) -> None:
    """Raises a ValueError that names field, value and limit."""
    limit = each.metadata["limit"]
    if limit is not None and not (value is None and each.metadata["optional"]):
        demand(limit.valid(value), each.name, value, f"expected {limit.wanted}")


def check_fields(config: Any) -> None:
    """Raises a ValueError for the first field that is beyond its limit."""
    for each in settings(config):
        check_field(each, getattr(config, each.name))


def described(kind: Any) -> Any:
    """Adds the docs of its fields to the docstring of a class."""
    lines = ["", "Attributes:"]
    for each in settings(kind):
        text = f"{each.name}: {each.metadata['doc']}."
        lines += textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="        ")
    kind.__doc__ = (kind.__doc__ or "").rstrip() + "\n    " + "\n    ".join(lines) + "\n    "
    return kind


def demand(valid: bool, name: str, value: Any, wanted: str) -> None:
    """Raises a ValueError about a field unless it is `valid`."""
    if not valid:
        raise ValueError(f"{name}={short(value)} is invalid: {wanted}")
