"""NVIDIA's SPEED-Bench for `hsdraft bench`: its prompts in one file, and its figures out of a report.

    python benchmarks/speed_bench.py SPEED-Bench --out speed.jsonl
    hsdraft bench --prompts speed.jsonl --limit 104 --variants default,lookup --json report.json
    python benchmarks/speed_bench.py --report report.json

Each split ("SPEED-Bench: A Unified and Diverse Benchmark for Speculative Decoding") is a file, or a folder of parquet
files, named after it: `qualitative` has 11 categories; `throughput_1k` to `throughput_32k` are buckets of prompt
lengths, whose categories are entropy tiers. Without a place, files are taken from the Hub's cache. Nothing is
downloaded: NVIDIA's licence asks each user to fetch the data. Prompts without a text, and those that the target has no
positions for, are left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from runner import options, print_table

REPOSITORY = "nvidia/SPEED-Bench"
DEFINITION = (
    "AL, as SPEED-Bench has it: tokens emitted a step, the bonus token included, without the prompt's step and the "
    "last one, mean of a prompt's steps, then of the prompts. Only first turns are decoded"
)
_SPLIT = re.compile(r"(qualitative|throughput_\d+k)(?![^\W_])")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_FETCH = (
    f"fetch {REPOSITORY} and let NVIDIA's script fill in the texts (prepare_data.py in examples/specdec_bench of "
    "NVIDIA/Model-Optimizer), then name its folder"
)
KINDS = ("category", "entropy tier", "prompt length")


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, max_new_tokens=128)
    parser.add_argument("place", nargs="?", type=Path, help="folder or file; default: the Hub's cache")
    parser.add_argument("--out", type=Path, help="file for the prompts")
    parser.add_argument("--report", type=Path, help="report of `hsdraft bench --json` with such prompts")
    given = parser.parse_args(argv)
    if (given.out is None) == (given.report is None):
        parser.error("give --out for a file of prompts, or --report for figures")
    if given.report is not None:
        print_figures(json.loads(given.report.read_text(encoding="utf-8")))
        return
    rows, empty = read_prompts(given.place or _cached())
    kept = fitting(rows, given.target, given.max_new_tokens)
    given.out.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
    print(f"{len(kept)} prompts; left out: {empty} without a text, {len(rows) - len(kept)} too long for the target")
    if empty:
        print(_FETCH)


def read_prompts(place: Path) -> tuple[list[dict[str, Any]], int]:
    """Reads prompts of all splits in a folder or file, as rows for `hsdraft bench`: `turns` and `category`.

    The category of a throughput prompt is its bucket and tier, such as "1k mixed". Returns the number of prompts
    without a text too. Raises a ValueError if there are no such files, a row lacks a field, or no prompt has a text.
    """
    files = list(_files(place))
    if not files:
        raise ValueError(f"{place} holds no SPEED-Bench: expected .parquet or .jsonl files of its splits; {_FETCH}")
    prompts, empty = [], 0
    for split, file in files:
        bucket = split.removeprefix("throughput_") if split.startswith("throughput_") else ""
        for number, row in enumerate(_rows(file), 1):
            try:
                turns = row["turns"] if row.get("turns") is not None else [each["content"] for each in row["messages"]]
                category = f"{bucket} {row['category']}".strip()
            except (KeyError, TypeError) as error:
                raise ValueError(f"{file}, row {number}: no usable field {error}; {_FETCH}") from None
            if not turns or any(turn.startswith(_PLACEHOLDER) for turn in turns):
                empty += 1
            else:
                prompts.append({"turns": list(turns), "category": category})
    if not prompts:
        raise ValueError(f"{place} has {empty} prompts, none with its text; {_FETCH}")
    return prompts, empty


def _cached() -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(REPOSITORY, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        raise ValueError(f"SPEED-Bench is not here: {REPOSITORY} is not in the cache; {_FETCH}") from None


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    """Yields each file with its split, short prompts first; a single file of another name has no split."""
    if not place.is_dir():
        named = _SPLIT.findall(f"{place.absolute().parent.name}/{place.name}")
        yield (named[-1] if named else ""), place
        return
    files = [path for path in place.rglob("*") if path.suffix in (".parquet", ".jsonl")]
    splits = [(_SPLIT.findall(str(path.relative_to(place.parent))), path) for path in files]
    yield from sorted(((named[-1], path) for named, path in splits if named), key=lambda each: (_size(each[0]), each))


def _size(name: str) -> int:
    """Thousands of tokens in the name of a split or bucket; 0 for none."""
    digits = re.search(r"(\d+)k$", name)
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


def fitting(rows: Sequence[dict[str, Any]], target: str | None, max_new_tokens: int) -> list[dict[str, Any]]:
    """Returns the rows whose first turn, and an answer, the target has positions for. Loads no weights."""
    from hf_hsdraft.runtime.prompt_inputs import length_of
    from hf_hsdraft.runtime.target_loading import load_config, load_tokenizer

    room = getattr(load_config(target).get_text_config(), "max_position_embeddings", None) or float("inf")
    tokenizer = load_tokenizer(target)
    return [row for row in rows if length_of(tokenizer, row["turns"][0]) + max_new_tokens <= room]


def print_figures(report: Mapping[str, Any]) -> None:
    """Prints SPEED-Bench's figure and ours: by category, by entropy tier and by length of the prompt."""
    found = {name: figures(report, name) for name in report["runs"] if name != "plain"}
    for kind in KINDS:
        groups = list(dict.fromkeys(group for each in found.values() for group in each[kind]))
        if groups:
            columns = (f"{name}: AL, tau, tokens/s, speed-up" for name in found)
            cells = ([group, *(_cell(*each[kind][group]) for each in found.values())] for group in groups)
            print_table([f"by {kind}", *columns], cells)
            print()
    print(DEFINITION)


def figures(report: Mapping[str, Any], system: str) -> dict[str, dict[str, tuple[float | None, Any]]]:
    """Returns AL and the summary of a system, by kind of group and group."""
    from hf_hsdraft.bench.calls import Run
    from hf_hsdraft.bench.report import by_category

    own, plain = (
        [Run(**{**row, "statistics": None, "divergence": None}) for row in report["runs"][name]]
        for name in (system, "plain")
    )
    found: dict[str, dict[str, tuple[float | None, Any]]] = {}
    for kind in KINDS:
        labels = [group_of(category, kind) for category in report["categories"]]
        runs, others = ([run for run in each if labels[run.question]] for each in (own, plain))
        found[kind] = {
            group: (acceptance_length([run for run in runs if labels[run.question] == group]), summary)
            for group, summary in sorted(by_category(runs, others, labels).items(), key=lambda item: _size(item[0]))
        }
    return found


def group_of(category: str, kind: str) -> str:
    """Returns the group of a prompt by its `category`; empty for none of that kind."""
    bucket, _, tier = category.rpartition(" ")
    names = dict(zip(KINDS, ("", tier, bucket) if _size(bucket) else (category, "", ""), strict=True))
    return names[kind]


def acceptance_length(runs: Sequence[Any]) -> float | None:
    """Returns SPEED-Bench's AL, see `DEFINITION`; None if a run does not report its rounds."""
    steps: dict[int, list[int]] = {}
    for run in runs:
        if run.accepted is None:
            return None
        # A prompt's repeats are one list of steps; a call whose only step is the last one counts as one of 1 token.
        steps.setdefault(run.question, []).extend([1 + count for count in run.accepted[:-1]] or [1])
    return fmean(map(fmean, steps.values())) if steps else None


def _cell(length: float | None, summary: Any) -> str:
    from hf_hsdraft.bench.report import number

    return f"{number(length)}, {number(summary.tau)}, {summary.tokens_per_second:.1f}, {summary.speed_up:.2f}"


if __name__ == "__main__":
    sys.exit(main())
