"""The comparison as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..training.data.conversations import Prompt
from . import profile as profiling
from .profile import Profile
from .run import BATCH, CONTEXT, MEANING, NEW, Measured, SweepPoint
from .summary import DEFINITIONS, FIGURES, Summary, by_category, number, round_costs, shown, summarise
from .systems import PLAIN

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
    profiles: dict[str, Profile] = field(default_factory=dict)
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


def as_document(result: BenchResult) -> dict[str, Any]:
    """Returns the report for `--json`: settings, definitions, summaries and all single calls."""
    measured, drafted = result.measured, result.drafted()

    def point(each: SweepPoint) -> dict[str, Any]:
        figures = {name: asdict(row) for name, row in _summaries(each.measured).items()}
        found = {"value": each.value, "prompt_tokens": each.prompt_tokens, "summary": figures}
        return {**found, "left_out": each.measured.left_out}

    return {
        "definitions": {**DEFINITIONS, **MEANING, **profiling.DEFINITIONS},
        "settings": result.settings,
        "weights": {name: digest for name, digest in result.weights.items() if name in measured.runs},
        "summary": {name: asdict(row) for name, row in result.summaries().items()},
        "by_category": {
            name: {category: asdict(row) for category, row in rows.items()}
            for name, rows in result.categorised().items()
        },
        "round": {name: drafted.get(name, {}) for name in measured.others},
        "profile": {
            name: {**asdict(each), "limit": each.limit, "reached": each.reached}
            for name, each in result.profiles.items()
        },
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
        console.print(_profile_table(result))
        note(console, *(_limit_line(name, each) for name, each in result.profiles.items()))
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
        found["ms a round"] = profiling.DEFINITIONS["profile"]
        found |= {name: profiling.DEFINITIONS[name] for name in ("limit", "reached")}
    return found


def note(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False, markup=False)


def define(console: Console, definitions: Mapping[str, str]) -> None:
    note(console, *(f"{name}: {text}." for name, text in definitions.items()))


def _main_table(result: BenchResult) -> Table:
    names, lossy = shown(result.several), result.settings.get("lossy", ())
    table = Table("variant", *(FIGURES[name][0] for name in names))
    for name, row in result.summaries().items():
        title = escape(name) + (f" ({LOSSY})" if name in lossy else "")
        table.add_row(title, *map(row.cell, names))
    if lossy:
        table.caption = f"{LOSSY}: its rule of verification may change the text"
    return table


def _cost_table(result: BenchResult) -> Table:
    rows, summaries = result.drafted(), result.summaries()
    deepest = max(sum(key.startswith("depth_") for key in row) for row in rows.values())
    depths = range(1, min(deepest, _SHOWN_DEPTHS) + 1)  # the JSON has all depths
    table = Table("per round", *_PARTS, "acceptance length", *(f"accept {depth}" for depth in depths))
    for name, row in rows.items():
        cells = [*(number(row.get(part), 1) for part in ROUND_PARTS), number(summaries[name].acceptance_length)]
        table.add_row(escape(name), *cells, *(f"{row.get(f'depth_{depth}', 0.0):.2f}" for depth in depths))
    return table


def _category_table(result: BenchResult) -> Table:
    columns = result.categorised()
    table = Table("tau (speed-up) by category", *map(escape, columns))
    for category in next(iter(columns.values())):
        rows = [column[category] for column in columns.values()]
        table.add_row(escape(category) or "(none)", *(f"{number(row.tau)} ({row.speed_up:.2f})" for row in rows))
    return table


def _profile_table(result: BenchResult) -> Table:
    table = Table("ms a round (share)", *map(escape, result.profiles))
    for part in profiling.PARTS:
        cells = [
            f"{each.parts[part]:.2f} ({each.parts[part] / each.round_ms:.0%})" for each in result.profiles.values()
        ]
        table.add_row(part, *cells)
    table.add_row("round", *(f"{each.round_ms:.2f}" for each in result.profiles.values()))
    return table


def _limit_line(name: str, found: Profile) -> str:
    if found.limit is None:
        return f"{name}: no limit, none of its forwards could be repeated"
    line = (
        f"{name}: limit {found.limit:.2f} = tau {found.tau:.2f} x t(1) {found.forward_one_ms:.2f} ms / "
        f"t({found.timed_nodes}) {found.forward_nodes_ms:.2f} ms, {found.nodes:.1f} nodes a round"
    )
    if found.reached is None:
        return line
    return f"{line}; measured {found.decode_speed_up:.2f}, reached {found.reached:.0%}"


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
