"""Formats of published drafters that other projects write, and how each is recognised.

A family registers the formats that it loads. `AutoDrafter` asks them in ascending order of their rank, so that a format
with marks of its own is asked before one that is recognised by less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..common.checks import few, printable
from ..repository.checkpoint import Checkpoint


@dataclass(frozen=True)
class Format:
    """A format of drafters.

    Attributes:
        name: what it is called, as in messages.
        rank: order of asking.
        matches: whether a checkpoint is of this format, by its configuration and by the names of its tensors.
        load: makes a drafter of a checkpoint; keyword arguments are those of `from_pretrained`.
    """

    name: str
    rank: int
    matches: Callable[[Checkpoint], bool]
    load: Callable[..., Any]


_formats: dict[str, Format] = {}


def register_format(form: Format) -> None:
    """Makes `AutoDrafter` load a format. A format of the same name is replaced."""
    _formats[form.name] = form


def formats() -> list[Format]:
    """Returns all formats, in the order of asking."""
    return sorted(_formats.values(), key=lambda form: (form.rank, form.name))


def recognise(checkpoint: Checkpoint) -> Format:
    """Returns the format of a checkpoint.

    Raises:
        ValueError: it is of none; the message names what was found.
    """
    for form in formats():
        if form.matches(checkpoint):
            return form
    config = checkpoint.config
    marks = ("speculators_model_type", "architectures", "model_type")
    seen = ", ".join(f"{name}={printable(config[name])}" for name in marks if config.get(name) is not None)
    names = few(sorted(checkpoint.shapes), 8)
    raise ValueError(
        f"{printable(checkpoint.name)} is no drafter of a known format ({seen or 'no field names one'}; tensors: "
        f"{names or 'none'}): expected one of {', '.join(form.name for form in formats())}"
    )
