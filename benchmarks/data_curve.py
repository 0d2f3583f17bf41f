r"""Draws tau against the logarithm of training tokens, and prints the gain of ten times as many.

    hsdraft bench --prompts prompts.jsonl --drafter run1 --drafter run2 --variants chain,tree24x6 --json report.json
    python benchmarks/data_curve.py report.json curve.png --learned run1=400000 --learned run2=6000000

The tokens of a run are those of its answers times its epochs; see `training_recipe.json` and `figures.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import options


@dataclass(frozen=True)
class Curve:
    """What a variant reaches after so much learning."""

    variant: str  # name of the variant in the report
    points: Sequence[tuple[float, float]]  # answer tokens learned from, and tau

    @property
    def per_tenfold(self) -> float:
        """How much tau grows with ten times the tokens: the slope of the line of least squares."""
        tokens, taus = zip(*self.points, strict=True)
        return statistics.linear_regression(list(map(math.log10, tokens)), taus).slope


def curves_of(report: Mapping[str, Any], learned: Mapping[str, float]) -> list[Curve]:
    """Returns a curve for each variant of a report of `hsdraft bench`, whose systems are called `drafter: variant`.

    `learned` are the tokens that each drafter learned from, by its name in the report or the last part of it. Raises a
    ValueError if one is not in the report, or stands for several of its drafters; or a variant lacks two different
    numbers of tokens.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    seen: dict[str, set[str]] = {}
    for system, row in report["summary"].items():
        drafter, _, variant = system.rpartition(": ")
        name = drafter if drafter in learned else Path(drafter).name
        if name in learned:
            seen.setdefault(name, set()).add(drafter)
            found.setdefault(variant, []).append((learned[name], row["tau"]))
    if missing := sorted(set(learned) - seen.keys()):
        raise ValueError(f"the report has no drafter {', '.join(missing)}: name them as `--drafter` did")
    if twice := [name for name, drafters in seen.items() if len(drafters) > 1]:
        raise ValueError(f"the report has several drafters {twice[0]}: name them in full, as `--drafter` did")
    for variant, points in found.items():
        if len({tokens for tokens, _ in points}) < 2:
            raise ValueError(f"the curve of {variant} needs two different numbers of tokens: repeat --learned")
    return [Curve(variant, sorted(points)) for variant, points in found.items()]


def draw_curves(curves: Sequence[Curve], path: Path) -> Path:
    """Draws the curves, and returns the path written. Raises an ImportError if matplotlib is missing."""
    from hf_hsdraft.training.evaluate.pictures import COLOURS, new_figure, save_figure, style

    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        axes.plot(*zip(*curve.points, strict=True), color=COLOURS[index % len(COLOURS)], marker="o", markersize=4,
                  label=f"{curve.variant}: {curve.per_tenfold:+.2f} for ten times the tokens")  # fmt: skip
    axes.set_xscale("log")
    style(axes, "Acceptance by tokens learned from", "answer tokens, repetitions counted", "tau")
    figure.legend(loc="outside lower center", frameon=False, fontsize="small", ncols=2)
    return save_figure(figure, path)


def learned_by(text: str) -> tuple[str, float]:
    """Reads a drafter and the number of tokens that it learned from."""
    name, _, tokens = text.rpartition("=")
    if not (name and tokens.isdecimal() and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text}: expected name=number")
    return name, float(tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("report", type=Path, help="JSON file of `hsdraft bench --json`")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    learned = {"type": learned_by, "action": "append", "required": True}
    parser.add_argument("--learned", **learned, help="drafter=tokens that it learned from; repeat")
    given = parser.parse_args(arguments)
    curves = curves_of(json.loads(given.report.read_text()), dict(given.learned))
    for curve in curves:
        points = ", ".join(f"{tokens:,.0f}: {tau:.2f}" for tokens, tau in curve.points)
        print(f"{curve.variant}: tau {points}; {curve.per_tenfold:+.2f} for ten times the tokens")
    print(f"picture in {draw_curves(curves, given.picture)}")


if __name__ == "__main__":
    main()
