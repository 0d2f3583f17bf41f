"""Answers of `measure quality` and labels of `make verifier`, appended to a JSONL file so that a run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...bench.systems import System
from ...drafters.base.saved_drafter import WeightlessDrafter
from ...hub.drafter_files import METHOD_FILES, sha256
from .checked_tasks import Item
from .pivot_training import Place, Plan
from .quality import Answer


class KeptRows:
    """Results by their keys in a JSONL file: first what they depend on, then a result a line.

    The file is created if missing; a `path` of None keeps nothing. An incomplete last line, as a killed run leaves it,
    is dropped. A file that holds something else, or results of another `run`, is left as it is: a ValueError.
    """

    what: str  # what messages call the results, plural
    key: str  # of the first line's one entry

    def __init__(self, path: Path | None, run: Mapping[str, Any]) -> None:
        self._path, self.known = path, dict[Any, Any]()
        if path is None:
            return
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if text and not text.startswith(f'{{"{self.key}"'):
            raise ValueError(f"{path} holds something else than {self.what}: name another file, which is then made")
        lines = text[: text.rfind("\n") + 1].splitlines() or [json.dumps({self.key: run})]
        try:
            head, *rows = map(json.loads, lines)
            found, self.known = dict(head[self.key]), dict(map(self._parsed, rows))
        except (ValueError, KeyError, TypeError) as error:
            told = f"{path} is no file of {self.what} ({error}): name another file, which is then made"
            raise ValueError(told) from None
        for name, value in run.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{path} holds {self.what} of another run: {name} is {found.get(name)!r:.200} there and "
                    f"{value!r:.200} here; run as before to go on, or name another file"
                )
        if not text.endswith("\n"):
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def _parsed(self, line: dict[str, Any]) -> tuple[Any, Any]:
        """Returns key and result of a line; may raise a ValueError, KeyError or TypeError."""
        raise NotImplementedError

    def _enter(self, key: Any, result: Any, line: Mapping[str, Any]) -> None:
        """Enters a result and its line, unless it is known."""
        if self._path is not None and key not in self.known:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.known.setdefault(key, result)


class AnswerLog(KeptRows):
    """The answers of all systems, by way of decoding and place of the question; see `answers_run`."""

    what, key = "answers", "run"

    def of_mode(self, mode: str) -> dict[int, dict[str, Answer]]:
        return {place: answers for (known, place), answers in self.known.items() if known == mode}

    def add(self, mode: str, place: int, answers: dict[str, Answer]) -> None:
        row = {"mode": mode, "place": place, "answers": {name: asdict(answer) for name, answer in answers.items()}}
        self._enter((mode, place), answers, row)

    def _parsed(self, line: dict[str, Any]) -> tuple[Any, Any]:
        return (line["mode"], line["place"]), {name: Answer(**answer) for name, answer in line["answers"].items()}


class Labels(KeptRows):
    """Labels of mismatches; see `labels_run`.

    Runs with other questions or another drafter may share the file: only labels of equal mismatches are used.
    """

    what, key = "labels", "labels of"

    def of(self, place: Place) -> int | None:
        return self.known.get(json.dumps(_key(place)))

    def add(self, place: Place, label: int) -> None:
        self._enter(json.dumps(_key(place)), label, {"mismatch": _key(place), "pivot": label})

    def _parsed(self, line: dict[str, Any]) -> tuple[Any, Any]:
        if line["pivot"] not in (0, 1):
            raise ValueError("a label is neither 0 nor 1")
        return json.dumps(line["mismatch"]), line["pivot"]


def _key(place: Place) -> list[Any]:
    """The key of a mismatch: digest of the question, tokens before, the target's token and the drafted one."""
    return [digest([place.item]), list(place.before), place.own, place.drafted]


def answers_run(
    settings: dict[str, Any], items: Sequence[Item], systems: Sequence[System], target: Any
) -> dict[str, Any]:
    """Returns what answers depend on."""
    drafters = {id(system.drafter): system.drafter for system in systems if system.drafter is not None}
    return {
        **settings,
        "questions": digest(items),
        "systems": [system.name for system in systems],
        "target's digest": model_digest(target),
        "drafter's digest": [model_digest(drafter) for drafter in drafters.values()],
    }


def labels_run(target: Any, plan: Plan) -> dict[str, Any]:
    """Returns what labels depend on besides their mismatch."""
    fields = ("roll_outs", "temperature", "max_new_tokens", "seed")
    return {"target's digest": model_digest(target), **{name: getattr(plan, name) for name in fields}}


def digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps([asdict(item) for item in items]).encode()).hexdigest()[:16]


def model_digest(model: Any) -> str:
    """Returns a digest of what a target's or drafter's answers depend on, whatever its name and path.

    It covers weights, generation options, the document of a drafter without weights, the levels of a cascade, and
    weight files beside a drafter's, such as a verifier's. Offloaded weights are skipped.
    """
    found = hashlib.sha256()
    options = {**model.generation_config.to_dict(), "transformers_version": None}
    document = model.document() if isinstance(model, WeightlessDrafter) else None
    about: list[Any] = [type(model).__name__, options, document]
    if levels := getattr(model, "levels", ()):
        about += [model.tokens, *map(model_digest, levels)]
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
