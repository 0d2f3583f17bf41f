"""The comparison in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...bench.calls import BATCH, CONTEXT, NEW, SweepPoint
from ...bench.report import ROUND_PARTS, BenchResult, summarise
from .training_pictures import COLOURS, GREY, bars, new_figure, save_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SWEEPS = {
    CONTEXT: ("Speed-up by context length", "prompt tokens at most"),
    BATCH: ("Speed-up by batch size", "prompts a call"),
    NEW: ("Speed-up by length of the answer", "new tokens at most"),
}


def draw_bench(result: BenchResult, folder: Path, stem: str = "bench") -> list[Path]:
    """Draws speed-up by category, the parts of a round, acceptance by depth, and the sweeps; returns the paths.

    The folder is created if missing. A picture without data is skipped. Raises an ImportError without matplotlib.
    """
    figures = {
        "speed_up": _speed_up(result),
        "round": _round(result),
        "acceptance": _acceptance(result),
        **{axis: _sweep(axis, points) for axis, points in result.sweeps.items() if points},
    }
    return [
        save_figure(figure, folder / f"{stem}_{name}.png") for name, figure in figures.items() if figure is not None
    ]


def _speed_up(result: BenchResult) -> Figure | None:
    groups = result.categorised()
    if not groups:
        return None
    rows: dict[str, dict[str, float]] = {}
    for name, own in groups.items():
        named = {category or "no category": row.speed_up for category, row in own.items()}
        overall = {"all prompts": summarise(result.measured.runs[name], result.measured.plain).speed_up}
        rows[name] = {**(named if len(named) > 1 else {}), **overall}
    figure = new_figure(8.0, 1.6 + 0.22 * sum(map(len, rows.values())))
    axes = figure.subplots()
    bars(axes, rows)
    axes.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    style(axes, "Speed-up by category", "tokens/s over plain generate()", "")
    axes.grid(visible=False)
    return with_legend(figure)


def _round(result: BenchResult) -> Figure | None:
    """Draws the parts of a round from the profile if there is one, else from decoding statistics."""
    rows = {name: each.parts for name, each in result.profiles.items()} or {
        name: {part: row[part] for part in ROUND_PARTS} for name, row in result.drafted().items() if "draft" in row
    }
    if not rows:
        return None
    figure = new_figure(8.0, 1.9 + 0.45 * len(rows))
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for index, part in enumerate(next(iter(rows.values()))):
        widths = [row[part] for row in rows.values()]
        axes.barh(range(len(rows)), widths, 0.7, left=left, color=COLOURS[index % len(COLOURS)], label=part,
                  hatch="//" if index >= len(COLOURS) else None, edgecolor="white")  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(yticks=range(len(rows)), yticklabels=list(rows))
    axes.invert_yaxis()
    style(axes, "Where a round's time goes", "milliseconds a round", "")
    return with_legend(figure, columns=5)


def _acceptance(result: BenchResult) -> Figure | None:
    rows = {
        name: {int(key.removeprefix("depth_")): share for key, share in row.items() if key.startswith("depth_")}
        for name, row in result.drafted().items()
    }
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return None
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    for index, (name, row) in enumerate(rows.items()):
        draw_line(axes, index, name, list(row), list(row.values()))
    style(axes, "Rounds that accept so many drafted tokens or more", "drafted tokens", "share of rounds (0 to 1)")
    axes.set(ylim=(0, 1.02), xticks=sorted({depth for row in rows.values() for depth in row}))
    return with_legend(figure)


def _sweep(axis: str, points: Sequence[SweepPoint]) -> Figure:
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    names = dict.fromkeys(name for point in points for name in point.measured.others)
    for index, name in enumerate(names):
        measured = {point.value: point.measured for point in points if name in point.measured.others}
        speeds = [summarise(each.runs[name], each.plain).speed_up for each in measured.values()]
        draw_line(axes, index, name, list(measured), speeds)
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    title, label = _SWEEPS[axis]
    axes.set_xscale("log", base=2)
    axes.set_xticks([point.value for point in points], [str(point.value) for point in points])
    style(axes, title, label, "tokens/s over plain generate()")
    axes.margins(y=0.15)
    return with_legend(figure)


def draw_line(axes: Any, index: int, name: str, places: Sequence[float], values: Sequence[float]) -> None:
    axes.plot(places, values, color=COLOURS[index % len(COLOURS)], marker="o", markersize=4, label=name)


def with_legend(figure: Figure, columns: int = 2) -> Figure:
    figure.legend(loc="outside lower center", frameon=False, fontsize="small", ncols=columns)
    return figure
