"""Checks of untrusted values, their display in messages, and limits of drafter files."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

# 1: what decoding needs. 2: also which target and which weights belong to it. A newer format is refused.
FORMAT_VERSION = 2
LONGEST_NAME = 256  # characters of a name in a configuration
_ALIKE, _NEAR = 0.85, 0.7  # similarity of names, `difflib.SequenceMatcher.ratio`
MOST_NODES = 2**12  # limit of tree_size and beam_width


def is_integer(value: Any) -> bool:
    """Whether a value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_ascending(values: Sequence[Any], least: int, most: int) -> bool:
    """Whether values are integers from `least` to `most`, each above the one before."""
    in_range = all(is_integer(value) and least <= value <= most for value in values)
    return in_range and all(low < high for low, high in itertools.pairwise(values))


def short(value: Any) -> str:
    """A value's repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(value: Any, length: int = 120) -> str:
    """Untrusted text made safe for a terminal or a message."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text if len(text) <= length else f"{text[: length - 3]}..."


def nearest_option(name: str, options: Collection[str]) -> str:
    """Returns the option with the most similar name, or "" where none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(options), n=1, cutoff=_NEAR)), "")


def typo_of(name: str, options: Collection[str]) -> str:
    """Returns the option that a name is a typo of, or "" where it is none."""
    near = nearest_option(name, options)
    alike = difflib.SequenceMatcher(None, near, name).ratio() >= _ALIKE
    return near if alike and near != name else ""


def is_path(name: str) -> bool:
    """Whether a name can only be a path: a Hub name has at most one slash."""
    return name.startswith(("/", ".", "~", "\\")) or name.count("/") > 1


def few(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(printable(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def is_code_file(name: Any) -> bool:
    """Whether this names a Python module at the top level of a repository."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and bool(re.fullmatch(r"[A-Za-z_]\w*\.py", name, re.A))


def public_name(name: str) -> str:
    """A target's name without local directories, for publishing."""
    local = is_path(name) or os.path.exists(name) or ":" in name
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if local else name


@dataclass(frozen=True)
class Limit:
    """Allowed values of a field: a predicate and its wording."""

    valid: Callable[[Any], bool]
    wanted: str


def integer(most: int, least: int = 1) -> Limit:
    """An integer range; the upper limit catches typos and files that would exhaust memory."""
    return Limit(lambda value: is_integer(value) and least <= value <= most, f"an integer from {least} to {most:,}")


def choice(*names: str) -> Limit:
    return Limit(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}")


POSITIVE = Limit(lambda value: is_number(value) and 0.0 < value < 1e12, "a positive number")


def setting(doc: str, default: Any = dataclasses.MISSING, limit: Limit | None = None, **further: Any) -> Any:
    """Declares a field of a configuration.

    `further` goes to `dataclasses.field`, except `optional=True`, which allows None despite the limit; `derived`, a
    function that computes the value from the earlier fields if it is None; and `convert`, which converts it to one
    type.
    """
    known = {name: further.pop(name, None) for name in ("optional", "derived", "convert")}
    return dataclasses.field(default=default, metadata={"doc": doc, "limit": limit, **known}, **further)


def settings(kind: Any) -> list[dataclasses.Field[Any]]:
    """The fields declared by `setting`, in order."""
    return [each for each in dataclasses.fields(kind) if "doc" in each.metadata]


def check_field(each: dataclasses.Field[Any], value: Any) -> None:
    """Raises a ValueError with field, value and limit if the value is invalid."""
    limit = each.metadata["limit"]
    if limit is not None and not (value is None and each.metadata["optional"]):
        demand(limit.valid(value), each.name, value, f"expected {limit.wanted}")


def check_fields(config: Any) -> None:
    """Raises a ValueError for the first invalid field."""
    for each in settings(config):
        check_field(each, getattr(config, each.name))


def misfit_of(wanted: Any, target: Any) -> str:
    """Returns which size of a target is not that of a drafter's configuration, or ""."""
    config = target.config.get_text_config(decoder=True)
    layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    for name, found, expected in (
        ("vocab_size", config.vocab_size, wanted.vocab_size),
        ("hidden_size", config.hidden_size, wanted.target_hidden_size),
        ("num_hidden_layers", layers, wanted.target_num_hidden_layers),
    ):
        if found != expected:
            return f"the target has {name}={found}, the drafter expects {expected}"
    return ""


def demand(valid: bool, name: str, value: Any, wanted: str) -> None:
    """Raises a ValueError about a field unless `valid`."""
    if not valid:
        raise ValueError(f"{name}={short(value)} is invalid: {wanted}")
