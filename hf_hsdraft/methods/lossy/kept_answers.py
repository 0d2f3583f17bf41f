"""Answers of `measure quality` and labels of `make verifier`, appended to a JSONL file so that a run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ...bench.systems import System
from ...drafters.base.saved_drafter import WeightlessDrafter
from ...hub.drafter_files import METHOD_FILES, sha256
from .checked_tasks import Item
from .pivot_training import Place, Plan
from .quality import Answer

Result = TypeVar("Result")


class KeptResults(Generic[Result]):
    """Results by their keys in a JSONL file: first what they depend on, then a result a line.

    The file is created if missing; a `path` of None keeps nothing. An incomplete last line, as a killed run leaves it,
    is dropped. A file that holds something else, or results of another `run`, is left as it is: a ValueError.

    Args:
        what: what messages call the results, plural.
        head: name of the first line's one entry.
        fields: names of a line's entries: those of the key, then that of the result.
        read: makes a result from its JSON, which is that of its dataclass; may raise a ValueError or TypeError.
    """

    def __init__(
        self,
        path: Path | None,
        run: Mapping[str, Any],
        what: str,
        head: str,
        fields: Sequence[str],
        read: Callable[[Any], Result],
    ) -> None:
        self._path, self._fields, self._known = path, fields, dict[str, Result]()
        if path is None:
            return
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if text and not text.startswith(f'{{"{head}"'):
            raise ValueError(f"{path} holds something else than {what}: name another file, which is then made")
        lines = text[: text.rfind("\n") + 1].splitlines() or [json.dumps({head: run})]
        try:
            first, *rows = map(json.loads, lines)
            found = dict(first[head])
            for row in rows:
                *key, result = (row[field] for field in fields)
                self._known[json.dumps(key)] = read(result)
        except (ValueError, KeyError, TypeError) as error:
            told = f"{path} is no file of {what} ({error}): name another file, which is then made"
            raise ValueError(told) from None
        for name, value in run.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{path} holds {what} of another run: {name} is {found.get(name)!r:.200} there and "
                    f"{value!r:.200} here; run as before to resume, or name another file"
                )
        if not text.endswith("\n"):
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def of(self, key: Sequence[Any], make: Callable[[], Result]) -> Result:
        """Returns the result of a key. An unknown one is made and kept at once."""
        name = json.dumps(list(key))
        if name not in self._known:
            self._known[name] = made = make()
            if self._path is not None:
                row = dict(zip(self._fields, (*key, made), strict=True))
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, default=asdict) + "\n")
        return self._known[name]


def kept_answers(
    path: Path | None, settings: Mapping[str, Any], items: Sequence[Item], systems: Sequence[System], target: Any
) -> KeptResults[dict[str, Answer]]:
    """Returns the answers of all systems, by way of decoding and place of the question, with what they depend on."""
    drafters = {id(system.drafter): system.drafter for system in systems if system.drafter is not None}
    run = {} if path is None else {
        **settings,
        "questions": digest(items),
        "systems": [system.name for system in systems],
        "target's digest": model_digest(target),
        "drafter's digest": [model_digest(drafter) for drafter in drafters.values()],
    }  # fmt: skip

    def read(answers: dict[str, Any]) -> dict[str, Answer]:
        return {name: Answer(**answer) for name, answer in answers.items()}

    return KeptResults(path, run, "answers", "run", ("mode", "place", "answers"), read)


def kept_labels(path: Path | None, target: Any, plan: Plan) -> KeptResults[int]:
    """Returns labels of mismatches, by `key_of`, with what else they depend on.

    Runs with other questions or another drafter may share the file: only labels of equal mismatches are used.
    """
    fields = ("roll_outs", "temperature", "max_new_tokens", "seed")
    run = {} if path is None else {
        "target's digest": model_digest(target), **{name: getattr(plan, name) for name in fields}
    }  # fmt: skip

    def read(label: Any) -> int:
        if label not in (0, 1):
            raise ValueError("a label is neither 0 nor 1")
        return int(label)

    return KeptResults(path, run, "labels", "labels of", ("mismatch", "pivot"), read)


def key_of(place: Place) -> list[list[Any]]:
    """The key of a mismatch: digest of the question, tokens before, the target's token and the drafted one."""
    return [[digest([place.item]), list(place.before), place.own, place.drafted]]


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
