"""Keeps the labels of `hsdraft train-verifier` as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .kept_rows import keep, read_kept
from .pivot_training import Place, Plan
from .quality_log import digest, model_digest


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
        return cls() if path is None else cls(path, dict(read_kept(path, "labels", "labels of", run, _row)))

    def of(self, place: Place) -> int | None:
        """Returns the label of a mismatch; `None` if it is not known."""
        return self.known.get(json.dumps(_key(place)))

    def add(self, place: Place, label: int) -> None:
        """Enters the label of a mismatch."""
        self.known[json.dumps(_key(place))] = label
        if self.path is not None:
            keep(self.path, {"mismatch": _key(place), "pivot": label})


def _row(line: dict[str, Any]) -> tuple[str, int]:
    if line["pivot"] not in (0, 1):
        raise ValueError("a label is neither 0 nor 1")
    return json.dumps(line["mismatch"]), line["pivot"]


def run_of(target: Any, plan: Plan) -> dict[str, Any]:
    """Returns what labels depend on besides their mismatch."""
    fields = ("roll_outs", "temperature", "max_new_tokens", "seed")
    return {"target's digest": model_digest(target), **{name: getattr(plan, name) for name in fields}}


def _key(place: Place) -> list[Any]:
    """What tells a mismatch from others: a digest of the question, tokens before, the target's and the drafted one."""
    return [digest([place.item]), list(place.before), place.own, place.drafted]
