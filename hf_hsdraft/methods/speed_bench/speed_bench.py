"""SPEED-Bench ("SPEED-Bench: A Unified and Diverse Benchmark for Speculative Decoding"): its files and its figures.

Each of its splits is a file, or a folder of parquet files, named after it. `qualitative` has 11 categories.
`throughput_1k` to `throughput_32k` are buckets of prompt lengths, whose categories are entropy tiers. Nothing is
downloaded here: NVIDIA's licence asks each user to fetch the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.markup import escape
from rich.table import Table
from transformers.utils import logging

from ...bench.calls import Run
from ...bench.prompts import FORMATS, PromptFormat
from ...bench.report import BenchResult
from ...bench.summary import Summary, by_category, number
from ...training.data.conversations import Prompt

logger = logging.get_logger(__name__)

NAME = "speed-bench"
REPOSITORY = "nvidia/SPEED-Bench"
DEFINITION = (
    "AL, as SPEED-Bench has it: tokens emitted a step, the bonus token included, without the prompt's step and the "
    "last one, mean of a prompt's steps, then of the prompts. Only first turns are decoded"
)
_SPLIT = re.compile(r"(qualitative|throughput_\d+k)(?![^\W_])")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_FETCH = (
    f"fetch {REPOSITORY} and let NVIDIA's script fill in the texts (prepare_data.py in examples/specdec_bench of "
    "NVIDIA/Model-Optimizer), then name its folder by --prompts"
)
_KINDS = ("category", "entropy tier", "prompt length")


@dataclass(frozen=True)
class SpeedPrompt(Prompt):
    """A prompt of SPEED-Bench. `category` also names the bucket of a throughput prompt, so buckets are taken evenly."""

    question: str = ""  # `question_id`
    split: str = ""  # "qualitative", "throughput_1k", ...
    label: str = ""  # `category` in the file: one of 11, or an entropy tier
    sub_category: str = ""
    difficulty: str = ""
    source: str = ""

    @property
    def bucket(self) -> str:
        """Length of a throughput prompt, as "1k"; empty for a qualitative one."""
        return self.split.removeprefix("throughput_") if self.split.startswith("throughput_") else ""

    @property
    def groups(self) -> Mapping[str, str]:
        """Its group of each kind that it belongs to."""
        return {"entropy tier": self.label, "prompt length": self.bucket} if self.bucket else {"category": self.label}


def is_speed_bench(path: Path) -> bool:
    """Whether `--prompts` names SPEED-Bench, one of its folders or files."""
    return str(path) == NAME or path.is_dir() or path.suffix == ".parquet" or bool(_SPLIT.fullmatch(path.stem))


def read_speed_bench(path: Path) -> list[SpeedPrompt]:
    """Reads prompts of all splits in a folder or file; warns of those whose text is not in the files.

    Rows have the fields of the data set: `question_id`, `category`, `sub_category`, `turns` (or `messages` with the
    same turns), `source`, `difficulty`.

    Args:
        path: a folder, a parquet or JSONL file, or `speed-bench`: the folder of this name if there is one, else what
            the Hub's cache has of the data set.

    Raises:
        ImportError: the files are parquet, and pyarrow is missing.
        ValueError: there are no such files, a row lacks a field, or no prompt has a text.
    """
    files = list(_files(_found(path)))
    if not files:
        raise ValueError(f"{path} holds no SPEED-Bench: expected .parquet or .jsonl files of its splits; {_FETCH}")
    prompts, empty = [], 0
    for split, file in files:
        for place, row in enumerate(_rows(file), 1):
            try:
                prompt = _prompt(row, split)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{file}, row {place}: no usable field {error}; {_FETCH}") from None
            if not prompt.turns or any(turn.startswith(_PLACEHOLDER) for turn in prompt.turns):
                empty += 1
            else:
                prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} has {empty} prompts, none with its text; {_FETCH}")
    if empty:
        logger.warning(f"{empty} prompts of {path} are left out, as their texts are not in the files; {_FETCH}")
    return prompts


def _found(path: Path) -> Path:
    if str(path) != NAME or path.exists():
        return path
    try:
        return Path(snapshot_download(REPOSITORY, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"SPEED-Bench is not here: no folder {NAME}, and {REPOSITORY} is not in the cache; {_FETCH}"
        ) from None


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    """Yields each file with its split, short prompts first; a single file of another name has no split."""
    if not place.is_dir():
        named = _SPLIT.findall(f"{place.absolute().parent.name}/{place.name}")
        yield (named[-1] if named else ""), place
        return
    files = [path for path in place.rglob("*") if path.suffix in (".parquet", ".jsonl")]
    splits = [(_SPLIT.findall(str(path.relative_to(place.parent))), path) for path in files]
    yield from sorted(((named[-1], path) for named, path in splits if named), key=lambda each: (_size(each[0]), each))


def _size(split: str) -> int:
    """Thousands of tokens in the name of a split or bucket; 0 for none."""
    digits = re.search(r"(\d+)k$", split)
    return int(digits[1]) if digits else 0


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise ImportError(f"{file.name} needs pyarrow: pip install pyarrow") from None
        yield from parquet.read_table(file).to_pylist()
        return
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _prompt(row: Mapping[str, Any], split: str) -> SpeedPrompt:
    turns = row["turns"] if row.get("turns") is not None else [message["content"] for message in row["messages"]]
    label = str(row["category"])
    bucket = split.removeprefix("throughput_") if split.startswith("throughput_") else ""
    plain = Prompt.of(turns, f"{bucket} {label}".strip())
    more = {name: str(row.get(name) or "") for name in ("sub_category", "difficulty", "source")}
    return SpeedPrompt(plain.key, plain.turns, plain.category, str(row["question_id"]), split, label, **more)


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one system for one group of prompts: SPEED-Bench's and ours."""

    prompts: int
    acceptance_length: float | None  # SPEED-Bench's, see `DEFINITION`; None if the system does not report its steps
    summary: Summary


def speed_figures(
    runs: Sequence[Run], plain: Sequence[Run], prompts: Sequence[Prompt]
) -> dict[str, dict[str, GroupFigures]]:
    """Returns the figures of a system by kind of group ("category", "entropy tier", "prompt length") and group."""
    found: dict[str, dict[str, GroupFigures]] = {}
    for kind in _KINDS:
        labels = [prompt.groups.get(kind, "") if isinstance(prompt, SpeedPrompt) else "" for prompt in prompts]
        own, other = ([run for run in each if labels[run.question]] for each in (runs, plain))
        summaries = by_category(own, other, labels)
        for group in sorted(summaries, key=lambda name: (_size(name), name)):
            of_group = [run for run in own if labels[run.question] == group]
            count = len({run.question for run in of_group})
            figures = GroupFigures(count, acceptance_length(of_group), summaries[group])
            found.setdefault(kind, {})[group] = figures
    return found


def acceptance_length(runs: Sequence[Run]) -> float | None:
    """Returns SPEED-Bench's AL, see `DEFINITION`; None if a run does not report its rounds."""
    steps: dict[int, list[int]] = {}
    for run in runs:
        if run.accepted is None:
            return None
        # A prompt's repeats are one list of steps; a call whose only step is the last one counts as one of 1 token.
        steps.setdefault(run.question, []).extend([1 + count for count in run.accepted[:-1]] or [1])
    return fmean(map(fmean, steps.values())) if steps else None


Figures = dict[str, dict[str, dict[str, GroupFigures]]]  # by system, kind of group and group


def _figures(result: BenchResult) -> Figures:
    measured = result.measured
    return {name: speed_figures(runs, measured.plain, result.questions) for name, runs in measured.others.items()}


def _tables(result: BenchResult) -> Iterator[Table | str]:
    """SPEED-Bench's figure and ours, by category, by entropy tier and by length of the prompt."""
    speed = _figures(result)
    for kind, groups in next(iter(speed.values())).items():
        columns = (f"{escape(name)}: AL, tau, tokens/s, speed-up" for name in speed)
        table = Table(f"SPEED-Bench by {kind}", "prompts", *columns)
        for group, first in groups.items():
            cells = (_cell(kinds[kind][group]) for kinds in speed.values())
            table.add_row(escape(group), str(first.prompts), *cells)
        yield table
    yield DEFINITION


def _cell(found: GroupFigures) -> str:
    row = found.summary
    return f"{number(found.acceptance_length)}, {number(row.tau)}, {row.tokens_per_second:.1f}, {row.speed_up:.2f}"


def _document(result: BenchResult) -> dict[str, Any]:
    """The figures of each system, and what each prompt is, without its text."""
    rows = [{name: value for name, value in asdict(prompt).items() if name != "turns"} for prompt in result.questions]
    groups = {
        system: {kind: {name: asdict(each) for name, each in of.items()} for kind, of in kinds.items()}
        for system, kinds in _figures(result).items()
    }
    return {"definition": DEFINITION, "figures": groups, "prompts": rows}


FORMATS[NAME] = PromptFormat(SpeedPrompt, is_speed_bench, read_speed_bench, _tables, _document)
