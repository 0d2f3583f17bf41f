"""The figures of a comparison, as tables and as JSON. Every figure has one definition, printed and stored with it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..core.methods import load
from ..runtime.misreading import tie_margin
from ..training.data.conversations import Prompt
from .calls import BATCH, CONTEXT, MEANING, NEW, Measured, Run, SweepPoint
from .systems import PLAIN

_TIES = ", ".join(
    f"{tie_margin(dtype):.2g} in {str(dtype).removeprefix('torch.')}"
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
)

_GROWTH = "the same less the memory held when the call began, which may include memory kept for reuse; median"
# All figures by name: title and decimals of their column in the main table, if they have one, and definition. "spread"
# is the first one's where systems decode prompts several times, else the second one's.
FIGURES: dict[str, tuple[str, int, str]] = {
    "tau": ("tau", 2, "tokens emitted per target forward, the prompt's forward and the bonus token included (plain "
        "decoding: 1)"),
    "acceptance_length": ("", 2, "tokens emitted per verifying forward, the bonus token included and the prompt's "
        "forward not: 1 + accepted drafted tokens / rounds"),
    "tokens_per_second": ("tokens/s", 1, "new tokens of all prompts over the seconds of their calls, the prompt's "
        "forward included; median over repeats"),
    "speed_up": ("speed-up", 2, "tokens/s over plain generate(), same settings, process and repeat, in changing order; "
        "median over repeats"),
    "time_ratio": ("", 2, "seconds of all calls over those of plain generate(), same settings, process and repeat, in "
        "changing order; median over repeats; below 1 is quicker"),
    "first_calls": ("", 2, "seconds of the first call of each system in this process, which are in no other figure; "
        "plain generate() comes first, so its call includes what a process does only once"),
    "speed_up_repeats": ("spread", 2, "least and greatest of the repeats' speed-ups"),
    "speed_up_prompts": ("spread", 2, "10th percentile, median and 90th percentile of the prompts' own speed-ups, each "
        "from its median seconds per token over repeats; the table has the first and the last"),
    "decode_speed_up": ("after 1st token", 2, "speed-up after the first token: tokens/s after the tokens that came "
        "first, over those of plain generate()"),
    "first_token_ms": ("1st token ms", 0, "milliseconds until the first new token was handed to a streamer; median "
        "over calls"),
    "peak_memory_mb": ("peak MB", 0, "most memory held during a call, in 10^6 bytes, all loaded weights included (GPU: "
        f"allocated; CPU: resident memory of the process); greatest of all calls; in brackets {_GROWTH}"),
    "peak_growth_mb": ("", 0, _GROWTH),
    "identical": ("identical", 0, "prompts whose text is plain decoding's in every repeat (sampled: with the same "
        "seed)"),
    "ties": ("ties", 0, f"prompts that parted where the target's top-1/top-2 margin is at most {_TIES}; greedy texts "
        "only"),
    "divergent": ("divergent", 0, "prompts that parted elsewhere"),
    "round": ("", 1, "milliseconds of a round of our own decoding: draft, verify, commit, and other (Python between "
        "them)"),
    "depth_N": ("", 2, "share of rounds that accepted at least N drafted tokens"),
}  # fmt: skip
DEFINITIONS = {name: text for name, (_, _, text) in FIGURES.items()}


def shown(several: bool) -> list[str]:
    """Returns the figures of the main table, where systems decode prompts several times or once."""
    other = "speed_up_prompts" if several else "speed_up_repeats"
    return [name for name, (title, _, _) in FIGURES.items() if title and name != other]


def number(value: float | None, digits: int = 2) -> str:
    return _EMPTY if value is None else f"{value:.{digits}f}"


class Summary(SimpleNamespace):
    """The figures of one system, by their names in `FIGURES`. `None` stands for unknown or meaningless."""

    def cell(self, name: str) -> str:
        """Returns a figure as the main table shows it."""
        value, digits = getattr(self, name), FIGURES[name][1]
        if isinstance(value, tuple):
            return f"{value[0]:.{digits}f}..{value[-1]:.{digits}f}"
        grown = self.peak_growth_mb if name == "peak_memory_mb" else None
        return number(value, digits) + (f" (+{grown:.0f})" if grown is not None else "")


def summarise(runs: Sequence[Run], plain: Sequence[Run]) -> Summary:
    """Returns the figures of one system, given its runs and plain decoding's of the same prompts and repeats."""
    repeats = _side_by_side(runs, plain, lambda run: run.repeat)
    ratios = [_speed(own) / _speed(other) for own, other in repeats]
    prompts = [
        _seconds_per_token(other) / _seconds_per_token(own)
        for own, other in _side_by_side(runs, plain, lambda run: run.question)
    ]
    decoding = [(_decode_speed(own), _decode_speed(other)) for own, other in repeats]
    firsts = [1e3 * run.first_seconds for run in runs if run.first_seconds is not None]
    held = [(run.memory_peak / 1e6, run.memory_before) for run in runs if run.memory_peak is not None]
    growths = [peak - before / 1e6 for peak, before in held if before is not None]
    lengths = [length for run in runs for length in run.accepted or ()]  # none where the system reports no rounds
    identical, ties, divergent = _texts(runs)
    low, middle, high = (float(share) for share in numpy.quantile(prompts, (0.1, 0.5, 0.9)))
    return Summary(
        tau=_tau(runs),
        acceptance_length=1 + sum(lengths) / len(lengths) if lengths else None,
        tokens_per_second=statistics.median(_speed(own) for own, _ in repeats),
        speed_up=statistics.median(ratios),
        time_ratio=statistics.median(_seconds(own) / _seconds(other) for own, other in repeats),
        speed_up_repeats=(min(ratios), max(ratios)),
        speed_up_prompts=(low, middle, high),
        decode_speed_up=_median([own / other for own, other in decoding if own is not None and other is not None]),
        first_token_ms=_median(firsts),
        peak_memory_mb=max((peak for peak, _ in held), default=None),
        peak_growth_mb=_median(growths),
        identical=identical,
        ties=ties,
        divergent=divergent,
    )


def by_category(runs: Sequence[Run], plain: Sequence[Run], categories: Sequence[str]) -> dict[str, Summary]:
    """Returns the figures of one system for each category; `categories` has one entry per question."""
    pairs = _side_by_side(runs, plain, lambda run: categories[run.question])
    names = dict.fromkeys(categories[run.question] for run in runs)
    return {name: summarise(own, other) for name, (own, other) in zip(names, pairs, strict=True)}


def round_costs(runs: Sequence[Run]) -> dict[str, float]:
    """Returns milliseconds of a round by part, and acceptance by depth, as far as the runs report them."""
    costs = {}
    calls = [run.statistics for run in runs if run.statistics is not None]
    rounds = sum(call.rounds for call in calls)
    if rounds:
        for part in ("draft", "verify", "commit"):
            costs[part] = 1e3 * sum(getattr(call, f"{part}_seconds") for call in calls) / rounds
        total = 1e3 * sum(call.total_seconds - call.prefill_seconds for call in calls) / rounds
        costs["other"] = total - sum(costs.values())
    lengths = [length for run in runs for length in run.accepted or ()]
    for depth in range(1, max(1, *lengths) + 1 if lengths else 1):
        costs[f"depth_{depth}"] = sum(length >= depth for length in lengths) / len(lengths)
    return costs


def _tau(runs: Sequence[Run]) -> float | None:
    """Returns tau; `None` for batches of other systems, which do not count the rows of a forward."""
    if any(run.rows > 1 and run.statistics is None for run in runs):
        return None
    return sum(run.tokens for run in runs) / sum(run.forwards for run in runs)


def _texts(runs: Sequence[Run]) -> tuple[int | None, int | None, int | None]:
    """Returns the numbers of identical, tied and divergent prompts (or rows); `None` where texts cannot be compared."""
    if any(run.same_rows is None for run in runs):
        return None, None, None
    identical = ties = divergent = 0
    for repeats in _grouped(runs, lambda run: run.question).values():
        same = min(run.same_rows or 0 for run in repeats)
        parted = [run.divergence for run in repeats if run.divergence is not None]
        tied = bool(parted) and all(each.is_tie for each in parted)
        identical += same
        ties += tied
        divergent += repeats[0].rows - same - tied
    return identical, ties, divergent


def _grouped(runs: Sequence[Run], key: Callable[[Run], object]) -> dict[object, list[Run]]:
    groups: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return groups


def _side_by_side(
    runs: Sequence[Run], plain: Sequence[Run], key: Callable[[Run], object]
) -> list[tuple[list[Run], list[Run]]]:
    others = _grouped(plain, key)
    return [(group, others[name]) for name, group in _grouped(runs, key).items()]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _speed(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / _seconds(runs)


def _seconds(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs)


def _seconds_per_token(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds / run.tokens for run in runs)


def _decode_speed(runs: Sequence[Run]) -> float | None:
    """Returns tokens/s after the first tokens; `None` if a run does not report when they came, or none came after."""
    if any(run.first_seconds is None for run in runs):
        return None
    tokens = sum(run.tokens - run.first_tokens for run in runs)
    seconds = sum(run.seconds - (run.first_seconds or 0.0) for run in runs)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


_SHOWN_DEPTHS = 8
ROUND_PARTS = ("draft", "verify", "commit", "other")
_PARTS = [f"{part} ms" for part in ROUND_PARTS]
_EMPTY = "-"
_HIDDEN = ("variants", "lossy")  # settings that the tables show
LOSSY = "lossy"  # marks a system whose verification may change the text
_TITLES = {CONTEXT: "context", BATCH: "batch", NEW: "new tokens"}


@dataclass
class BenchResult:
    """All results of a comparison."""

    settings: dict[str, Any]  # settings, machine and versions
    # digest of the weights of each of our systems, so that figures are not attributed to another drafter
    weights: dict[str, Any]
    questions: Sequence[Prompt]
    measured: Measured = field(default_factory=Measured)
    profiles: dict[str, Any] = field(default_factory=dict)  # see `methods/round_profile.py`
    sweeps: dict[str, list[SweepPoint]] = field(default_factory=dict)  # points of each sweep, by axis

    @property
    def several(self) -> bool:
        """Whether systems decoded each prompt several times."""
        return int(self.settings.get("repeats", 1)) > 1

    @property
    def categories(self) -> list[str]:
        """Of each prompt."""
        return [each.category for each in self.questions]

    def summaries(self) -> dict[str, Summary]:
        return _summaries(self.measured)

    def categorised(self) -> dict[str, dict[str, Summary]]:
        """The figures of each system but plain decoding, by category."""
        plain = self.measured.runs.get(PLAIN, [])
        return {name: by_category(runs, plain, self.categories) for name, runs in self.measured.others.items()}

    def drafted(self) -> dict[str, dict[str, float]]:
        costs = {name: round_costs(runs) for name, runs in self.measured.others.items()}
        return {name: row for name, row in costs.items() if row}


def _summaries(measured: Measured) -> dict[str, Summary]:
    return {name: summarise(runs, measured.plain) for name, runs in measured.runs.items() if runs}


def _profiling() -> Any:
    return load("measuring", "profile")


def as_document(result: BenchResult) -> dict[str, Any]:
    """Returns the report for `--json`: settings, definitions, summaries and all single calls."""
    measured, drafted = result.measured, result.drafted()

    def point(each: SweepPoint) -> dict[str, Any]:
        figures = {name: vars(row) for name, row in _summaries(each.measured).items()}
        found = {"value": each.value, "prompt_tokens": each.prompt_tokens, "summary": figures}
        return {**found, "left_out": each.measured.left_out}

    return {
        "definitions": {**DEFINITIONS, **MEANING, **(_profiling().DEFINITIONS if result.profiles else {})},
        "settings": result.settings,
        "weights": {name: digest for name, digest in result.weights.items() if name in measured.runs},
        "summary": {name: vars(row) for name, row in result.summaries().items()},
        "by_category": {
            name: {category: vars(row) for category, row in rows.items()} for name, rows in result.categorised().items()
        },
        "round": {name: drafted.get(name, {}) for name in measured.others},
        "profile": {name: each.document() for name, each in result.profiles.items()},
        "first_calls": {name: asdict(run) for name, run in measured.first.items()},
        "left_out": measured.left_out,
        **{axis: list(map(point, points)) for axis, points in result.sweeps.items()},
        "categories": result.categories,
        "runs": {name: [asdict(run) for run in runs] for name, runs in measured.runs.items()},
    }


def print_report(result: BenchResult, console: Console) -> None:
    """Prints all tables, what was left out and why, every divergence, and the definitions."""
    measured = result.measured
    note(console, ", ".join(f"{name}={value}" for name, value in result.settings.items() if name not in _HIDDEN))
    console.print(_main_table(result))
    first = [f"{name} {run.seconds:.2f} s ({run.tokens} new tokens)" for name, run in measured.first.items()]
    note(console, *([f"first calls: {', '.join(first)}"] if first else []))
    note(console, *(f"left out: {name}: {reason}" for name, reason in measured.left_out.items()))
    if result.drafted():
        console.print(_cost_table(result))
    if len(set(result.categories)) > 1 and measured.others:
        console.print(_category_table(result))
    if result.profiles:
        _profiling().print_profiles(result.profiles, console)
    for axis, points in result.sweeps.items():
        console.print(sweep_table(axis, points))
        left_out = ((point.value, *each) for point in points for each in point.measured.left_out.items())
        note(console, *(f"left out at {value}: {name}: {why}" for value, name, why in left_out))
    for name, runs in measured.runs.items():
        for run in runs:
            if run.divergence is not None and run.repeat == 0:
                category = result.categories[run.question]
                console.print(f"{name}, question {run.question} ({category}): {run.divergence}", markup=False)
    define(console, _glossary(result))


def _glossary(result: BenchResult) -> dict[str, str]:
    """What the tables show, by the titles of their columns."""
    found = {FIGURES[name][0]: DEFINITIONS[name] for name in shown(result.several)}
    if result.measured.first:
        found["first calls"] = DEFINITIONS["first_calls"]
    if result.drafted():
        found[", ".join(_PARTS)] = DEFINITIONS["round"]
        found["acceptance length"] = DEFINITIONS["acceptance_length"]
        found["accept N"] = DEFINITIONS["depth_N"]
    for axis in result.sweeps:
        found |= sweep_glossary(axis)
    if result.profiles:
        parts = dict(_profiling().DEFINITIONS)
        found |= {"ms a round": parts.pop("profile"), **parts}
    return found


def note(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False, markup=False)


def define(console: Console, definitions: Mapping[str, str]) -> None:
    note(console, *(f"{name}: {text}." for name, text in definitions.items()))


def by_system(title: str, columns: Mapping[str, Sequence[str]], rows: Iterable[str]) -> Table:
    """A table with a column for each system, which fits terminals of 80 columns; long names wrap."""
    table = Table(Column(title, overflow="fold"), *(Column(escape(name), overflow="fold") for name in columns))
    for row in zip(rows, *columns.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


def _main_table(result: BenchResult) -> Table:
    names, marks = shown(result.several), dict.fromkeys(result.settings.get("lossy", ()), f" ({LOSSY})")
    columns = {name + marks.get(name, ""): [*map(row.cell, names)] for name, row in result.summaries().items()}
    table = by_system("all prompts", columns, (FIGURES[name][0] for name in names))
    if marks:
        table.caption = f"{LOSSY}: its rule of verification may change the text"
    return table


def _cost_table(result: BenchResult) -> Table:
    rows, summaries, columns = result.drafted(), result.summaries(), {}
    deepest = max(sum(key.startswith("depth_") for key in row) for row in rows.values())
    depths = range(1, min(deepest, _SHOWN_DEPTHS) + 1)  # the JSON has all depths
    for name, row in rows.items():
        cells = [*(number(row.get(part), 1) for part in ROUND_PARTS), number(summaries[name].acceptance_length)]
        columns[name] = cells + [f"{row.get(f'depth_{depth}', 0.0):.2f}" for depth in depths]
    return by_system("per round", columns, [*_PARTS, "acceptance length", *(f"accept {depth}" for depth in depths)])


def _category_table(result: BenchResult) -> Table:
    found = result.categorised()
    columns = {n: [f"{number(each.tau)} ({each.speed_up:.2f})" for each in of.values()] for n, of in found.items()}
    return by_system("tau (speed-up) by category", columns, (name or "(none)" for name in next(iter(found.values()))))


def sweep_glossary(axis: str) -> dict[str, str]:
    """What a table of `sweep_table` shows, by its titles."""
    time = {"time": DEFINITIONS["time_ratio"]} if axis == NEW else {}
    figures = {"speed-up": DEFINITIONS["speed_up"], "tau": DEFINITIONS["tau"]}
    return {_TITLES[axis]: MEANING[axis], **time, **figures, "same": "texts that are plain decoding's, of all texts"}


def sweep_table(axis: str, points: Sequence[SweepPoint]) -> Table:
    names = list(dict.fromkeys(name for point in points for name in point.measured.others))
    what = "time, speed-up, tau, same" if axis == NEW else "speed-up, tau, same"
    table = Table(_TITLES[axis], "prompt tokens", "plain tokens/s", *(f"{escape(name)}: {what}" for name in names))
    for point in points:
        rows = _summaries(point.measured)
        total = sum(run.rows for run in point.measured.plain if run.repeat == 0)
        cells = [_sweep_cell(axis, rows[name], total) if name in rows else _EMPTY for name in names]
        speed = f"{rows[PLAIN].tokens_per_second:.1f}"
        table.add_row(str(point.value), f"{point.prompt_tokens:.0f}", speed, *cells)
    return table


def _sweep_cell(axis: str, row: Summary, total: int) -> str:
    same = _EMPTY if row.identical is None else f"{row.identical}/{total}"
    time = f"{row.time_ratio:.2f}, " if axis == NEW else ""
    return f"{time}{row.speed_up:.2f}, {number(row.tau)}, {same}"
