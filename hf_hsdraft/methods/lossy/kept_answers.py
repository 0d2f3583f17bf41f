"""Answers of `hsdraft quality` and labels of `train-verifier`, appended to a JSONL file so that a run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ...bench.systems import System
from ...drafters.base.protocol import Drafter
from ...drafters.base.saved_drafter import WeightlessDrafter
from ...hub.drafter_files import METHOD_FILES, sha256
from .checked_tasks import Item
from .pivot_training import Place, Plan
from .quality import Answer

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


class AnswerLog:
    """A JSONL file: first what the answers depend on (`answers_run`), then those of all systems, a question a line.

    `known` holds answers by way of decoding, place of the question, and system. A `path` of None keeps nothing.
    Raises a ValueError if the file holds something else, or answers of another run.
    """

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self._path, self.known = path, dict[str, dict[int, dict[str, Answer]]]()
        for mode, place, answers in [] if path is None else read_kept(path, "answers", "run", run, _answer_row):
            self.known.setdefault(mode, {})[place] = answers

    def add(self, mode: str, place: int, answers: dict[str, Answer]) -> None:
        """Enters the answers to a question, unless they are known."""
        if self._path is None or place in self.known.get(mode, {}):
            return
        self.known.setdefault(mode, {})[place] = answers
        row = {"mode": mode, "place": place, "answers": {name: asdict(answer) for name, answer in answers.items()}}
        keep(self._path, row)


def _answer_row(line: dict[str, Any]) -> tuple[str, int, dict[str, Answer]]:
    return line["mode"], line["place"], {name: Answer(**answer) for name, answer in line["answers"].items()}


def answers_run(
    settings: dict[str, Any], items: Sequence[Item], systems: Sequence[System], target: Any
) -> dict[str, Any]:
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

        Raises a ValueError if the file holds something else, or labels of another run (see `labels_run`).
        """
        return cls() if path is None else cls(path, dict(read_kept(path, "labels", "labels of", run, _label_row)))

    def of(self, place: Place) -> int | None:
        return self.known.get(json.dumps(_key(place)))

    def add(self, place: Place, label: int) -> None:
        self.known[json.dumps(_key(place))] = label
        if self.path is not None:
            keep(self.path, {"mismatch": _key(place), "pivot": label})


def _label_row(line: dict[str, Any]) -> tuple[str, int]:
    if line["pivot"] not in (0, 1):
        raise ValueError("a label is neither 0 nor 1")
    return json.dumps(line["mismatch"]), line["pivot"]


def labels_run(target: Any, plan: Plan) -> dict[str, Any]:
    fields = ("roll_outs", "temperature", "max_new_tokens", "seed")
    return {"target's digest": model_digest(target), **{name: getattr(plan, name) for name in fields}}


def _key(place: Place) -> list[Any]:
    """The key of a mismatch: digest of the question, tokens before, the target's token and the drafted one."""
    return [digest([place.item]), list(place.before), place.own, place.drafted]
