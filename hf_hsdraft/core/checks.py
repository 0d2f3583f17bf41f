"""Checks of values that somebody else wrote, how such values are shown, and limits of a drafter's files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

# 1: what decoding needs. 2: also which target and which weights belong to it. A newer format is refused.
FORMAT_VERSION = 2
LONGEST_NAME = 256  # characters of a name in a configuration
MOST_NODES = 2**12  # of a tree, and of those that are expanded at a depth


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; Python counts `True` and `False` among them, nobody who sets a size does."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is an integer or a float, and neither `True` nor `False`."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(value: Any) -> str:
    """The representation of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(value: Any, length: int = 120) -> str:
    """Text that somebody else wrote, as it may go to a terminal or into a message."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text if len(text) <= length else f"{text[: length - 3]}..."


def few(names: Sequence[str], most: int = 5) -> str:
    """The first of many names."""
    shown = ", ".join(printable(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def is_code_file(name: Any) -> bool:
    """Whether this is the name of a Python module at the top of a repository."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and bool(re.fullmatch(r"[A-Za-z_]\w*\.py", name, re.A))


def public_name(name: str) -> str:
    """A target's name as it may be published: of a path on this machine, the last part only."""
    local = name.startswith(("/", ".", "~", "\\")) or name.count("/") > 1 or os.path.exists(name) or ":" in name
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if local else name
