"""Rows that a long run appends to a JSONL file, so that an interrupted run can resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def read_kept(
    path: Path, what: str, key: str, run: Mapping[str, Any], parse: Callable[[dict[str, Any]], Row]
) -> list[Row]:
    """Returns the rows of a file, which is created if missing and then ready for more lines.

    The first line says what the rows depend on. An incomplete last line, as a killed run leaves it, is dropped.

    Args:
        what: what messages call the rows, plural.
        key: of the first line's one entry.
        run: what the rows depend on; must equal the first line's entries.
        parse: makes a row of a line; may raise a ValueError, KeyError or TypeError.

    Raises:
        ValueError: the file holds something else, or rows of another run. It is left unchanged.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if text and not text.startswith(f'{{"{key}"'):
        raise ValueError(f"{path} holds something else than {what}: name another file, which is then made")
    lines = text[: text.rfind("\n") + 1].splitlines() or [json.dumps({key: run})]
    try:
        head, *rows = map(json.loads, lines)
        found, kept = dict(head[key]), [parse(row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of {what} ({error}): name another file, which is then made") from None
    for name, value in run.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path} holds {what} of another run: {name} is {found.get(name)!r:.200} there and {value!r:.200} "
                "here; run as before to go on, or name another file"
            )
    if not text.endswith("\n"):
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return kept


def keep(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
