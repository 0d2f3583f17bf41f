"""Keeps the answers of `hsdraft quality` as they come, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ...bench.systems import System
from ...drafters.base.protocol import Drafter
from ...drafters.base.saved_drafter import WeightlessDrafter
from ...hub.drafter_files import METHOD_FILES, sha256
from .checked_tasks import Item
from .kept_rows import keep, read_kept
from .quality import Answer


class AnswerLog:
    """A JSONL file: first what the answers depend on, see `run_of`, then a line per question with those of all systems.

    `known` holds answers by way of decoding, place of the question, and system. A `path` of None keeps nothing.
    Raises a ValueError if the file holds something else, or answers of another run.
    """

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self._path, self.known = path, dict[str, dict[int, dict[str, Answer]]]()
        for mode, place, answers in [] if path is None else read_kept(path, "answers", "run", run, _row):
            self.known.setdefault(mode, {})[place] = answers

    def add(self, mode: str, place: int, answers: dict[str, Answer]) -> None:
        """Enters the answers to a question, unless they are known."""
        if self._path is None or place in self.known.get(mode, {}):
            return
        self.known.setdefault(mode, {})[place] = answers
        row = {"mode": mode, "place": place, "answers": {name: asdict(answer) for name, answer in answers.items()}}
        keep(self._path, row)


def _row(line: dict[str, Any]) -> tuple[str, int, dict[str, Answer]]:
    return line["mode"], line["place"], {name: Answer(**answer) for name, answer in line["answers"].items()}


def run_of(settings: dict[str, Any], items: Sequence[Item], systems: Sequence[System], target: Any) -> dict[str, Any]:
    drafters = {id(system.drafter): system.drafter for system in systems if system.drafter is not None}
    return {
        **settings,
        "questions": digest(items),
        "systems": [system.name for system in systems],
        "target's digest": model_digest(target),
        "drafter's digest": [model_digest(drafter) for drafter in drafters.values()],
    }


def digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps([asdict(item) for item in items]).encode()).hexdigest()[:16]


@runtime_checkable
class HasLevels(Protocol):
    levels: Sequence[Drafter]
    tokens: Sequence[int]


def model_digest(model: Any) -> str:
    """Returns a digest of what a target's or drafter's answers depend on, whatever its name and path.

    It covers weights, generation options, the document of a drafter without weights, the levels of a cascade, and
    weight files beside a drafter's, such as a verifier's. Offloaded weights are skipped.
    """
    found = hashlib.sha256()
    options = {**model.generation_config.to_dict(), "transformers_version": None}
    document = model.document() if isinstance(model, WeightlessDrafter) else None
    about: list[Any] = [type(model).__name__, options, document]
    if isinstance(model, HasLevels):
        about += [model.tokens, *map(model_digest, model.levels)]
    found.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items() if isinstance(model, torch.nn.Module) else ():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if not value.is_meta:
            found.update(value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    folder = getattr(model, "loaded_from", None)
    beside = [] if folder is None else [*folder.glob("*.safetensors"), *map(folder.joinpath, METHOD_FILES)]
    for path in sorted({path for path in beside if path.is_file()}):
        found.update(f"{path.name} {sha256(path)}".encode())
    return found.hexdigest()[:16]
