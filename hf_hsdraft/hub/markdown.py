"""Markdown from untrusted text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(each) for each in line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value on one line, as it may stand in a table."""
    return " ".join(str(value).replace("|", "\\|").split())


def code(text: str) -> str:
    return f"`{cell(text).replace('`', '')}`"
