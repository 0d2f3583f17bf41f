"""Pictures of a training run (learning curves, acceptance by depth, calibration), and of a drafter's speed-up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.progress import Stage
from ...hub.model_card import circumstances
from ...training.files import write_complete

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito colours, distinguishable with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_BLUE, _ORANGE = COLOURS[:2]
GREY = "#767676"
_COLUMNS = 4  # greatest number of panels side by side


def draw_pictures(
    history: Sequence[Mapping[str, float]],
    calibration: Mapping[str, list] | None,
    folder: str | Path,
    stage: Stage | None = None,
) -> list[Path]:
    """Draws `learning_curves.png`, `acceptance.png` and `calibration.png`, and returns the paths written.

    A picture without data is left out. Only a finished picture replaces an older one.

    Args:
        history: `TrainerState.log_history`. By `step`, it is read for `loss` and `eval_loss` (nats) and `eval_tau`
            (tokens per target forward). Its last evaluation is read for `eval_accuracy_1..K` (first choice right after
            the true tokens) and `eval_acceptance_1..K` (drafted token accepted, in rounds that came so far).
        calibration: mean `confidence`, `accuracy` and `count` of the drafted tokens: tables of K depths x B equal bins
            of confidence from 0 to 1.
        folder: folder of the pictures, created if it is missing.

    Raises an ImportError: matplotlib is missing.
    """
    draw: dict[str, Callable[[], Figure | None]] = {
        "learning_curves": lambda: _learning_curves(history),
        "acceptance": lambda: _acceptance(history),
        "calibration": lambda: _calibration(calibration) if calibration else None,
    }
    stage = stage or Stage("drawing", "pictures")
    stage.start(len(draw))
    written = []
    for number, (name, figure_of) in enumerate(draw.items(), 1):
        if (figure := figure_of()) is not None:
            written.append(save_figure(figure, Path(folder) / f"{name}.png"))
        stage.advance(number)
    return written


def draw_speed_up(benchmarks: Sequence[Mapping[str, Any]], folder: str | Path) -> Path | None:
    """Draws `speed_up.png`: speed-up and tau by category, for the drafter's fastest variant in each benchmark.

    `benchmarks` are as `hsdraft hub card` enters them into `figures.json`. Returns `None` if none has categories.
    """
    panels = [each for each in benchmarks if len(each["by_category"].get(each["ours"][0], {})) > 1]
    if not panels:
        return None
    rows = max(len(each["by_category"][each["ours"][0]]) for each in panels)
    figure = new_figure(9.0, (1.4 + 0.3 * rows) * len(panels))
    grid: Any = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for axes, benchmark in zip(grid, panels, strict=True):
        _categories(axes, benchmark)
    handles = {
        label: drawn for axes in grid[:, 0] for drawn, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", frameon=False, fontsize="small", ncols=2
    )
    return save_figure(figure, Path(folder) / "speed_up.png")


def _categories(axes: Any, benchmark: Mapping[str, Any]) -> None:
    """Draws speed-up and tau of the fastest variant and of one other system, the best category on top."""
    groups, ours = benchmark["by_category"], benchmark["ours"]
    shown = [ours[0], *[name for name in benchmark["summary"] if name not in ours][:1]]
    order = sorted(groups[ours[0]], key=lambda category: -groups[ours[0]][category]["speed_up"])
    for panel, metric, title in zip(axes, ("speed_up", "tau"), ("speed-up (plain: 1)", "tau (plain: 1)"), strict=True):
        bars(panel, {name: {each or "none": groups[name][each][metric] for each in order} for name in shown})
        panel.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
        style(panel, title, "", "")
        panel.grid(visible=False)
    axes[0].set_ylabel(", ".join(circumstances(benchmark["settings"])), fontsize="small")


def bars(axes: Any, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Draws horizontal bars, grouped by place and coloured by system, the first on top."""
    places = list(dict.fromkeys(place for row in rows.values() for place in row))
    height = 0.8 / len(rows)
    for index, (name, row) in enumerate(rows.items()):
        at = [places.index(place) + (index - (len(rows) - 1) / 2) * height for place in row]
        drawn = axes.barh(at, list(row.values()), height * 0.94, color=COLOURS[index % len(COLOURS)], label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize="x-small", padding=2)
    axes.set(yticks=range(len(places)), yticklabels=places, ylim=(len(places) - 0.5, -0.5))
    axes.margins(x=0.12)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches; other figures of the process are not touched."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing pictures needs matplotlib: pip install -e '.[train]' in a checkout") from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, and creates the folder. Only a finished picture replaces an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_complete(path, lambda partial: figure.savefig(partial, format="png"))
    return path


def style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Gives axes a title and labels, and removes what the data do not need."""
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.title.set_fontsize("medium")
    axes.tick_params(labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)


def _learning_curves(history: Sequence[Mapping[str, float]]) -> Figure | None:
    training, held_out, tau = (
        [(entry["step"], entry[key]) for entry in history if key in entry and "step" in entry]
        for key in ("loss", "eval_loss", "eval_tau")
    )
    panels = bool(training or held_out) + bool(tau)
    if not panels:
        return None
    figure = new_figure(5.0 * panels, 3.6)
    axes: list[Axes] = list(figure.subplots(1, panels, squeeze=False)[0])
    if training or held_out:
        if training:
            axes[0].plot(*zip(*training, strict=True), color=_BLUE, linewidth=1, alpha=0.8, label="training")
        if held_out:
            axes[0].plot(*zip(*held_out, strict=True), color=_ORANGE, marker="o", markersize=4, label="held out")
        style(axes[0], "Loss", "optimiser step", "loss (nats)")
        axes[0].legend(frameon=False)
    if tau:
        axes[-1].plot(*zip(*tau, strict=True), color=_ORANGE, marker="o", markersize=4)
        step, best = max(tau, key=lambda point: point[1])
        title = f"tau, held out: best {best:.2f} at step {step:,.0f}"
        style(axes[-1], title, "optimiser step", "tokens per target forward")
    return figure


def _per_depth(entry: Mapping[str, float], prefix: str) -> dict[int, float]:
    """Returns the values of the keys `prefix_1`, `prefix_2` and so on, by depth. Unmeasured depths are left out."""
    found = {re.fullmatch(rf"{prefix}_(\d+)", key): value for key, value in entry.items()}
    return {int(match[1]): value for match, value in found.items() if match and math.isfinite(value)}


def _acceptance(history: Sequence[Mapping[str, float]]) -> Figure | None:
    series = {
        "eval_accuracy": (_BLUE, "training: first choice right after the true tokens"),
        "eval_acceptance": (_ORANGE, "decoding: drafted token accepted, where all before it were"),
    }
    for entry in reversed(history):
        found = {name: values for name in series if (values := _per_depth(entry, name))}
        if found:
            break
    else:
        return None
    depths = sorted(set().union(*found.values()))
    width = 0.8 / len(found)
    figure = new_figure(max(6.0, 1.5 + 0.95 * len(depths)), 3.8)
    axes = figure.subplots()
    for index, (name, values) in enumerate(found.items()):
        color, label = series[name]
        places = [depth + (index - (len(found) - 1) / 2) * width for depth in values]
        bars = axes.bar(places, list(values.values()), width * 0.94, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize="x-small", padding=1)
    step = f", step {entry['step']:,.0f}" if "step" in entry else ""
    style(axes, f"What training sees and what decoding gets{step}", "draft depth (tokens)", "share of cases (0 to 1)")
    axes.set(xticks=depths, ylim=(0, 1.02))
    figure.legend(loc="outside lower center", frameon=False, fontsize="small", ncols=1)
    return figure


def _calibration(calibration: Mapping[str, list]) -> Figure | None:
    columns = zip(*(calibration[name] for name in ("confidence", "accuracy", "count")), strict=True)
    every = {depth: list(zip(*lists, strict=True)) for depth, lists in enumerate(columns, start=1)}
    depths = {depth: bins for depth, bins in every.items() if any(count for _, _, count in bins)}
    if not depths:
        return None
    rows = math.ceil(len(depths) / _COLUMNS)
    across = math.ceil(len(depths) / rows)
    figure = new_figure(max(2.6 * across, 4.2), 3.7 * rows + 0.3)
    figure.suptitle("Is the drafter as sure as it is right?\n(ECE: expected calibration error)", fontsize="medium")
    grid: Any = figure.subplots(2 * rows, across, squeeze=False, sharex=True, height_ratios=[3, 1] * rows)
    for index, (depth, bins) in enumerate(depths.items()):
        row, column = divmod(index, across)
        _reliability(grid[2 * row, column], grid[2 * row + 1, column], depth, bins, first=column == 0)
    for unused in grid[-2:, len(depths) - across * (rows - 1) :].flat:
        unused.set_visible(False)
    return figure


def _reliability(top: Axes, bottom: Axes, depth: int, bins: Sequence[tuple[float, float, int]], first: bool) -> None:
    """Draws accuracy over confidence at one depth, and below it the size of each bin; `first` adds labels."""
    filled = [(sure, right, count) for sure, right, count in bins if count]
    error = sum(abs(sure - right) * count for sure, right, count in filled) / sum(count for _, _, count in filled)
    top.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    top.plot(*list(zip(*filled, strict=True))[:2], color=_BLUE, marker="o", markersize=4, label=f"ECE {error:.3f}")
    style(top, f"depth {depth}", "", "share right (0 to 1)" if first else "")
    top.set(xlim=(0, 1), ylim=(0, 1.02))
    top.legend(frameon=False, fontsize="small", loc="upper left", handlelength=1.2)
    size = 1 / len(bins)
    bottom.bar([(i + 0.5) * size for i in range(len(bins))], [count for *_, count in bins], 0.94 * size, color=GREY)
    style(bottom, "", "confidence (0 to 1)", "tokens" if first else "")
    bottom.locator_params(axis="y", nbins=3)
