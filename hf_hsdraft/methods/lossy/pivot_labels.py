"""Keeps the labels of `hsdraft train-verifier` as they come, so that an interrupted run can resume."""

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
    """A JSONL file: first what labels depend on besides their mismatch, then one label a line.

    Runs with other questions or another drafter may share the file: only labels of equal mismatches are used. A
    `path` of None keeps nothing.
    """

    path: Path | None = None
    known: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, run: dict[str, Any]) -> Labels:
        """Returns the labels in a file, which is created if missing; no labels if `path` is None.

        Raises a ValueError if the file holds something else, or labels of another run (see `run_of`).
        """
        return cls() if path is None else cls(path, dict(read_kept(path, "labels", "labels of", run, _row)))

    def of(self, place: Place) -> int | None:
        return self.known.get(json.dumps(_key(place)))

    def add(self, place: Place, label: int) -> None:
        self.known[json.dumps(_key(place))] = label
        if self.path is not None:
            keep(self.path, {"mismatch": _key(place), "pivot": label})


def _row(line: dict[str, Any]) -> tuple[str, int]:
    if line["pivot"] not in (0, 1):
        raise ValueError("a label is neither 0 nor 1")
    return json.dumps(line["mismatch"]), line["pivot"]


def run_of(target: Any, plan: Plan) -> dict[str, Any]:
    fields = ("roll_outs", "temperature", "max_new_tokens", "seed")
    return {"target's digest": model_digest(target), **{name: getattr(plan, name) for name in fields}}


def _key(place: Place) -> list[Any]:
    """The key of a mismatch: digest of the question, tokens before, the target's token and the drafted one."""
    return [digest([place.item]), list(place.before), place.own, place.drafted]
