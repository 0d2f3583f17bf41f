"""Keeps the answers of `hsdraft quality` as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .checked_tasks import Item
from .quality import Answer


class AnswerLog:
    """A JSONL file: first what the run is, then a line with the answers of all systems to each question.

    Args:
        path: of the file; `None` keeps nothing.
        run: what the answers depend on. A file of another run is refused.

    Attributes:
        known: by the way of decoding and the place of the question, the answers of each system.

    Raises:
        ValueError: the file holds something else, or the answers of another run.
    """

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self._path, self.known = path, dict[str, dict[int, dict[str, Answer]]]()
        if path is None:
            return
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # a run that was killed may have left a part of a line
        if not lines:
            path.write_text(json.dumps({"run": run}) + "\n", encoding="utf-8")
            return
        try:
            head, *rows = map(json.loads, lines)
            self._check(head["run"], run)
            for row in rows:
                answers = {name: Answer(**answer) for name, answer in row["answers"].items()}
                self.known.setdefault(row["mode"], {})[row["place"]] = answers
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of answers ({error}): name another file, which is then made") from None
        if not text.endswith("\n"):
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def _check(self, found: dict[str, Any], run: dict[str, Any]) -> None:
        for name, value in run.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self._path} holds answers of another run: {name} is {found.get(name)!r:.200} there and "
                    f"{value!r:.200} here; run as before to go on, or name another file"
                )

    def add(self, mode: str, place: int, answers: dict[str, Answer]) -> None:
        """Enters the answers to a question, unless they are known."""
        if self._path is None or place in self.known.get(mode, {}):
            return
        self.known.setdefault(mode, {})[place] = answers
        row = {"mode": mode, "place": place, "answers": {name: asdict(answer) for name, answer in answers.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def digest(items: Sequence[Item]) -> str:
    """Returns a digest of questions and their answers."""
    return hashlib.sha256(json.dumps([asdict(item) for item in items]).encode()).hexdigest()[:16]
