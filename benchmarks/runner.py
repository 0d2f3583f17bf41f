"""What the scripts of this folder share: one style of options, loading, timing in turns, one table.

A script imports nothing else at its top, so `python benchmarks/x.py --help` loads nothing. The package has to be
installed, or to be on `PYTHONPATH`; what is compared with lies in `tests/oracles`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

_Way = TypeVar("_Way")
_Found = TypeVar("_Found")


def numbers(text: str, least: int = 0) -> list[int]:
    """Reads a comma-separated list of whole numbers from `least` on."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from {least} on, as in 1,8")
    return [int(part) for part in parts]


counts = functools.partial(numbers, least=1)


def names(text: str) -> list[str]:
    """Reads a comma-separated list of names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def rates(text: str) -> list[float]:
    """Reads a comma-separated list of numbers from 0 to 1."""
    found = [float(part) for part in names(text)]
    if not all(0 <= rate <= 1 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 0 to 1, as in 0.6,0.8")
    return found


_SHARED: dict[str, dict[str, Any]] = {
    "target": {"help": "Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct"},
    "drafter": {"action": "append", "help": "Hub name or folder; repeat for several"},
    "prompts": {"type": Path, "help": "JSONL with `turns`; default: those of `hsdraft bench`"},
    "limit": {"type": int, "help": "prompts in all, evenly from their categories"},
    "max_new_tokens": {"type": int, "help": "new tokens of each text"},
    "repeats": {"type": int, "help": "measurements of each"},
    "dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "dtype of targets and drafters"},
    "device": {"help": "device to run on"},
    "seed": {"type": int, "help": "seed of all random choices"},
    "json": {"type": Path, "help": "write all figures here too"},
}


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns the parser of a script, with the shared options of `defaults`; `...` for one that has to be given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        shared = dict(_SHARED[name])
        if default not in (None, ..., ""):
            shared["help"] += f"; default: {default}"
        given = {"required": True} if default is ... else {"default": default}
        parser.add_argument("--" + name.replace("_", "-"), **shared, **given)
    return parser


def dtype_of(given: argparse.Namespace) -> Any:
    """Returns the dtype that `--dtype` names."""
    import torch

    return getattr(torch, given.dtype)


def loaded_target(given: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the target that `--target` names, and its tokenizer."""
    from transformers.utils.logging import disable_progress_bar

    from hf_hsdraft.runtime.target_loading import load_target

    disable_progress_bar()
    return load_target(given.target, dtype_of(given), getattr(given, "device", "cpu"))


def prompt_texts(given: argparse.Namespace) -> list[str]:
    """Returns the first turns of `--prompts`, or of the prompts of `hsdraft bench`, `--limit` of them."""
    from hf_hsdraft.bench.calls import read_questions

    paths = [given.prompts] if getattr(given, "prompts", None) else []
    return [prompt.turns[0] for prompt in read_questions(paths, getattr(given, "limit", None))]


def in_turns(
    ways: Mapping[_Way, Callable[[], _Found]], turns: int, warm_up: int = 1, begin: int = 0
) -> dict[_Way, list[_Found]]:
    """Calls each of several ways, turn by turn and in changing order; returns what each returned in each turn.

    `warm_up` turns come before these, and are left out. The number of the first turn, `begin`, decides about the order.
    """
    from hf_hsdraft.bench.calls import turn_order

    found: dict[_Way, list[_Found]] = {name: [] for name in ways}
    for turn in range(turns + warm_up):
        for name in turn_order(list(ways), begin + turn):
            result = ways[name]()
            if turn >= warm_up:
                found[name].append(result)
    return found


@dataclass(frozen=True)
class Decoded:
    """What one call of `generate()` has brought."""

    seconds: float
    texts: list[list[int]]  # new tokens of each row
    statistics: Any  # of the drafting; `None` without a drafter


def decoded(
    target: Any,
    inputs: Mapping[str, Any],
    tokens: int,
    drafter: Any = None,
    **options: Any,
) -> Decoded:
    """Decodes a prompt or a batch once, greedily unless `options` of `generate()` say otherwise."""
    from hf_hsdraft.bench.calls import synchronise

    call = {"do_sample": False, "max_new_tokens": tokens, "return_dict_in_generate": True, **options}
    synchronise(target.device)
    begin = time.perf_counter()
    output = target.generate(**inputs, **call, assistant_model=drafter)
    synchronise(target.device)
    seconds = time.perf_counter() - begin
    texts = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return Decoded(seconds, texts, getattr(output, "statistics", None))


class LineWorker:
    """A process that says that it is ready, and then answers each order, as lines of JSON.

    Raises a RuntimeError with its status and last line of standard error if it ends, and an OSError if it cannot start.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 ends with the worker
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, **pipes, text=True)
        self._answer()

    def ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = f"its process ended with status {self._process.wait()}"
            self._errors.seek(0)
            raise RuntimeError(": ".join([status, *[line.strip() for line in self._errors if line.strip()][-1:]]))
        return json.loads(line)


def table_row(cells: Iterable[Any]) -> str:
    """Returns a line of a Markdown table. Numbers with a fraction have two digits; `None` is an empty cell."""

    def shown(cell: Any) -> str:
        return "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell).replace("|", "\\|")

    return f"| {' | '.join(map(shown, cells))} |"


def table_head(columns: Sequence[str]) -> str:
    """Returns the first two lines of a Markdown table."""
    return f"{table_row(columns)}\n|{'---|' * len(columns)}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a Markdown table, each row as soon as it is known."""
    print(table_head(columns), flush=True)
    for row in rows:
        print(table_row(row), flush=True)


def print_by_rows(
    given: argparse.Namespace, calls_of: Callable[[int], Mapping[str, Callable[[], float]]], first: str, unit: str
) -> None:
    """Times ways in turns for each number of `--rows`; prints and keeps medians of the milliseconds they return."""
    found: dict[str, dict[str, float]] = {}
    for rows in given.rows:
        for name, times in in_turns(calls_of(rows), given.repeats).items():
            found.setdefault(name, {})[str(rows)] = statistics.median(times)
    keep(given.json, {"milliseconds": found})
    heads = [f"{rows} {unit}s" if rows > 1 else f"1 {unit}" for rows in given.rows]
    print_table([first, *heads], ([name, *map("{:.1f}".format, each.values())] for name, each in found.items()))


def keep(path: Path | None, document: Mapping[str, Any]) -> None:
    """Writes figures as JSON where `--json` names a file."""
    from hf_hsdraft.training.files import write_json

    if path is not None:
        write_json(path, document)
