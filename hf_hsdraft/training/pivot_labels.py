"""Keeps the labels of `hsdraft train-verifier` as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bench.quality_log import digest, model_digest
from .pivots import Place, Plan

_HEAD = '{"labels of"'  # how a file of labels begins


@dataclass
class Labels:
    """A JSONL file: first what labels depend on besides their mismatch, then a line for each label.

    Other questions, or another drafter, may go on in the same file: only labels of the same mismatches are taken.

    Attributes:
        path: of the file; `None` keeps nothing.
        known: labels by their mismatch.
    """

    path: Path | None = None
    known: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, run: dict[str, Any]) -> Labels:
        """Returns the labels in a file, which is made if there is none.

        Args:
            path: of the file; `None` for no file.
            run: what the labels depend on, see `run_of`. A file of another run is refused.

        Raises:
            ValueError: the file holds something else, or the labels of another run.
        """
        if path is None:
            return cls()
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if text and not text.startswith(_HEAD):
            raise ValueError(f"{path} holds something else than labels: name another file, which is then made")
        lines = text[: text.rfind("\n") + 1].splitlines()  # a run that was killed may have left a part of a line
        if not lines:
            lines = [json.dumps({"labels of": run})]
        try:
            head, *rows = map(json.loads, lines)
            found = dict(head["labels of"])
            labels = cls(path, {json.dumps(row["mismatch"]): row["pivot"] for row in rows})
            if not set(labels.known.values()) <= {0, 1}:
                raise ValueError("a label is neither 0 nor 1")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of labels ({error}): name another file, which is then made") from None
        for name, value in run.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{path} holds labels of another run: {name} is {found.get(name)!r:.200} there and {value!r:.200} "
                    "here; run as before to go on, or name another file"
                )
        if not text.endswith("\n"):
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return labels

    def of(self, place: Place) -> int | None:
        """Returns the label of a mismatch; `None` if it is not known."""
        return self.known.get(json.dumps(_key(place)))

    def add(self, place: Place, label: int) -> None:
        """Enters the label of a mismatch."""
        self.known[json.dumps(_key(place))] = label
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mismatch": _key(place), "pivot": label}) + "\n")


def run_of(target: Any, plan: Plan) -> dict[str, Any]:
    """Returns what labels depend on besides their mismatch."""
    fields = ("roll_outs", "temperature", "max_new_tokens", "seed")
    return {"target's digest": model_digest(target), **{name: getattr(plan, name) for name in fields}}


def _key(place: Place) -> list[Any]:
    """What tells a mismatch from others: a digest of the question, tokens before, the target's and the drafted one."""
    return [digest([place.item]), list(place.before), place.own, place.drafted]
