"""Parts of Markdown, made of text that somebody else wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with one line for each row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(each) for each in line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value on one line, as it may stand in a table."""
    return " ".join(str(value).replace("|", "\\|").split())


def code(text: str) -> str:
    """A name as it is typed."""
    return f"`{cell(text).replace('`', '')}`"
