"""Figures of lossy rules with intervals, as tables, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Column, Table

from ...bench.systems import PLAIN
from .quality import EXACT, Answer, Quality, Rule, exact_name

LEAST_ACCURACY = 0.2  # of plain decoding; below it a task is uninformative
_RESAMPLES, _SEED = 1000, 0
_COVERED = 0.95
SPEEDS = ("speed_up", "gain")
_PRICE = ("accuracy", "kept", "relaxed", "same", "log_probability")  # the other figures have a separate table

DEFINITIONS = {
    "interval": f"{_COVERED:.0%} of {_RESAMPLES} bootstrap samples of the questions; every system has the same sample",
    "accuracy": f"share of right answers, in tasks that plain decoding gets right in {LEAST_ACCURACY:.0%} or more",
    "kept": "accuracy over plain decoding's, in the same tasks",
    "relaxed": "share of tokens that the rule accepted in place of the target's own: its most probable token, or its "
    "draw where it samples; plain decoding would not have chosen them",
    "same": "share of answers whose tokens are all plain decoding's (sampled: with the same seed)",
    "log_probability": "mean log-probability of a token under the target, at temperature 1, less that of plain "
    "decoding's own answers, in nats",
    "tokens": "mean number of new tokens of an answer",
    "repetition": "share of 4-grams that occurred before in the same answer",
    "tau": "tokens emitted per target forward, the prompt's forward and the bonus token included (plain decoding: 1)",
    "speed_up": "tokens/s over plain generate(), same process, in changing order",
    "gain": "tokens/s over exact drafting with the same drafts, likewise",
}


@dataclass(frozen=True)
class Figure:
    """A figure with its interval; NaN where it is undefined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}..{self.high:.3f})" if math.isfinite(self.value) else "-"

    def as_json(self) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


Row = dict[str, Figure]  # by the names in `DEFINITIONS`


def bootstrap(columns: Sequence[Sequence[float]], figure: Callable[..., torch.Tensor]) -> Figure:
    """Returns a figure of sums over questions (`columns`), with its interval; `figure` maps sums `[n]` to `[n]`."""
    numbers = torch.tensor([list(column) for column in columns], dtype=torch.float64)  # [k, questions]
    count = numbers.shape[1]
    picks = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(_SEED))
    sums = torch.stack([column[picks].sum(dim=1) for column in numbers])
    value = float(figure(*numbers.sum(dim=1, keepdim=True)))
    drawn = figure(*sums)
    drawn = drawn[drawn.isfinite()]
    if not math.isfinite(value) or not len(drawn):
        return Figure(math.nan, math.nan, math.nan)
    edge = (1 - _COVERED) / 2
    low, high = (float(drawn.quantile(at)) for at in (edge, 1 - edge))
    return Figure(value, low, high)


def accuracies(answers: Sequence[Answer]) -> dict[str, float]:
    tasks: dict[str, list[bool]] = {}
    for answer in answers:
        tasks.setdefault(answer.task, []).append(answer.right)
    return {task: sum(right) / len(right) for task, right in tasks.items()}


def told_by(plain: Sequence[Answer]) -> set[str]:
    """Returns the tasks that plain decoding gets right often enough to be informative."""
    return {task for task, accuracy in accuracies(plain).items() if accuracy >= LEAST_ACCURACY}


def row_of(own: Sequence[Answer], plain: Sequence[Answer], exact: Sequence[Answer]) -> Row:
    """Returns the figures of one system, compared with plain decoding and exact drafting of the same questions."""
    telling = told_by(plain)
    counted = [float(answer.task in telling) for answer in plain]
    right, plain_right = (
        [each.right * count for each, count in zip(answers, counted, strict=True)] for answers in (own, plain)
    )

    def of(name: str, answers: Sequence[Answer] = own) -> list[float]:
        return [float(getattr(answer, name)) for answer in answers]

    def speed(other: Sequence[Answer]) -> Figure:
        columns = (of("tokens"), of("seconds"), of("tokens", other), of("seconds", other))
        return bootstrap(columns, lambda a, b, c, d: (a / b) / (c / d))

    one = [1.0] * len(own)
    ratios = {
        "accuracy": (right, counted),
        "kept": (right, plain_right),
        "relaxed": (of("relaxed"), of("tokens")),
        "same": (of("same"), one),
        "tokens": (of("tokens"), one),
        "repetition": (of("repeated"), of("ngrams")),
        "tau": (of("tokens"), of("forwards")),
    }
    told = of("log_probability"), of("tokens"), of("log_probability", plain), of("tokens", plain)
    return {
        **{name: bootstrap(columns, torch.divide) for name, columns in ratios.items()},
        "log_probability": bootstrap(told, lambda a, b, c, d: a / b - c / d),
        "speed_up": speed(plain),
        "gain": speed(exact),
    }


def rows_of(answers: Mapping[str, Sequence[Answer]], rules: Mapping[str, Rule]) -> dict[str, Row]:
    """Returns the figures of each system. Each rule is compared with exact drafting of the same drafts."""
    exact = {name: answers[exact_name(rules[name]) if name in rules else EXACT] for name in answers}
    return {name: row_of(own, answers[PLAIN], exact[name]) for name, own in answers.items()}


def shown_figures(quality: Quality) -> list[str]:
    """Returns the names of the meaningful figures: speeds only where the machine was quiet."""
    return [name for name in DEFINITIONS if name != "interval" and (quality.timed or name not in SPEEDS)]


def as_document(quality: Quality) -> dict[str, Any]:
    """Returns the report for `--json`: settings, definitions, figures and all single answers."""
    shown = shown_figures(quality)
    hidden = () if quality.timed else ("seconds",)

    def of_all(figures: Callable[[Any], Any]) -> dict[str, Any]:
        """By mode and system."""
        return {mode: {name: figures(each) for name, each in rows.items()} for mode, rows in quality.answers.items()}

    return {
        "definitions": {name: text for name, text in DEFINITIONS.items() if name in (*shown, "interval")},
        "settings": {**quality.settings, "drafter": quality.drafter, "timed": quality.timed},
        "rules": {name: {**asdict(rule), "published": rule.is_published} for name, rule in quality.rules.items()},
        "figures": {
            mode: {
                name: {each: row[each].as_json() for each in shown}
                for name, row in rows_of(answers, quality.rules).items()
            }
            for mode, answers in quality.answers.items()
        },
        "accuracy_by_task": of_all(accuracies),
        "answers": of_all(
            lambda own: [{name: value for name, value in vars(each).items() if name not in hidden} for each in own]
        ),
    }


def _label(name: str, rules: Mapping[str, Rule]) -> str:
    return name if name not in rules else f"{name} (lossy{', as published' if rules[name].is_published else ''})"


def tables_of(quality: Quality) -> list[Table]:
    """Returns two tables of figures and one of the accuracies by task, for each way of decoding."""

    def table(title: str, columns: Iterable[str], cells: Mapping[str, Iterable[str]]) -> Table:
        made = Table(*(Column(escape(name), overflow="fold") for name in (title, *columns)))
        for name, row in cells.items():
            made.add_row(escape(_label(name, quality.rules)), *row)
        return made

    tables = []
    for mode, answers in quality.answers.items():
        rows, shown = rows_of(answers, quality.rules), shown_figures(quality)
        for names in (_PRICE, [name for name in shown if name not in _PRICE]):
            tables.append(table(mode, names, {name: [str(row[each]) for each in names] for name, row in rows.items()}))
        tasks, telling = accuracies(answers[PLAIN]), told_by(answers[PLAIN])
        shares = {name: [f"{value:.3f}" for value in accuracies(own).values()] for name, own in answers.items()}
        tables.append(table(f"{mode}: accuracy by task", tasks, shares))
        if silent := [task for task in tasks if task not in telling]:
            tables[-1].caption = f"say nothing, as plain decoding answers too few right: {', '.join(silent)}"
    return tables


def draw_quality(quality: Quality, path: Path) -> Path:
    """Draws accuracy kept and log-probability against the speed over plain decoding, a line for each rule.

    tau replaces the speed where the machine was not quiet. Rings mark published settings. The points of a line are in
    the order of the threshold, shown beside them where there are several.
    """
    from ..pictures.training_pictures import COLOURS, GREY, new_figure, save_figure, style

    lines: dict[str, list[Rule]] = {}
    for rule in sorted(quality.rules.values(), key=lambda rule: rule.value):
        others = {name: value for name, value in rule.options.items() if name != rule.threshold}
        lines.setdefault(Rule(rule.name, others).text, []).append(rule)
    across, axis = ("speed_up", "tokens/s over plain generate()") if quality.timed else ("tau", "tau")
    labels = {"kept": "accuracy over plain decoding's", "log_probability": "log-probability, nats a token"}
    figure = new_figure(5.0 * len(labels), 4.0 * len(quality.answers))
    grid: Any = figure.subplots(len(quality.answers), len(labels), squeeze=False)
    ring = {"markerfacecolor": "none"}
    for (mode, answers), line in zip(quality.answers.items(), grid, strict=True):
        rows = rows_of(answers, quality.rules)
        for axes, (what, label) in zip(line, labels.items(), strict=True):
            places = {name: (row[across].value, row[what].value) for name, row in rows.items()}
            for index, (text, rules) in enumerate(lines.items()):
                colour = COLOURS[index % len(COLOURS)]
                axes.plot(*zip(*(places[rule.text] for rule in rules), strict=True), color=colour, marker="o",
                          markersize=4, label=text)  # fmt: skip
                for rule in rules:
                    if len(rules) > 1:
                        axes.annotate(f"{rule.value:g}", places[rule.text], (4, 4), textcoords="offset points",
                                      fontsize="x-small", color=colour)  # fmt: skip
                    if rule.is_published:
                        axes.plot(*places[rule.text], "o", markersize=10, color=colour, **ring)
            axes.plot(*places[EXACT], "s", markersize=14, color=GREY, label=EXACT, **ring)
            axes.plot([], [], "o", markersize=10, color=GREY, label="as published", **ring)
            axes.axhline(1.0 if what == "kept" else 0.0, color=GREY, linewidth=1, linestyle="--")
            style(axes, f"{mode}: {label}", axis, label)
    handles, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", frameon=False, fontsize="small", ncols=3)
    return save_figure(figure, path)
