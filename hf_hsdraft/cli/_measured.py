"""`hsdraft card`: enters measurements into a drafter's `figures.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.checks import printable
from ..hub.card_figures import is_benchmark, is_chain, read_figures
from ..hub.drafter_files import FIGURES, digests, read_json
from ..training.evaluate.pictures import draw_speed_up
from ..training.files import write_json


def enter_benchmarks(folder: Path, reports: Sequence[Path], keep: bool = False) -> list[dict[str, Any]]:
    """Replaces the benchmarks in a drafter's figures by reports of `hsdraft bench --json`; returns their entries.

    With `keep`, earlier entries stay, except those of the same command. Raises a ValueError if a file is no such
    report, or is about other weights.
    """
    weights = digests(folder)
    entered = [_entry(path, read_json(path), weights) for path in reports]
    before = read_figures(folder)
    training = before["training"]
    if keep:  # the figures in a folder are always of its weights
        commands = {entry["settings"]["command"] for entry in entered}
        entered = [each for each in before["benchmarks"] if each["settings"]["command"] not in commands] + entered
    write_json(folder / FIGURES, {**({} if training is None else {"training": training}), "benchmarks": entered})
    if draw_speed_up([each for each in entered if not is_chain(each["ours"][0])], folder) is None:
        (folder / "speed_up.png").unlink(missing_ok=True)  # drawn from other figures
    return entered


def _entry(path: Path, report: Mapping[str, Any], weights: Mapping[str, str]) -> dict[str, Any]:
    measured, summary = report.get("weights"), report.get("summary")
    if not isinstance(measured, dict) or not isinstance(summary, dict):
        raise ValueError(f"{path} is no report of `hsdraft bench --json`: it names no weights or has no summary")
    ours = [variant for variant in measured if measured[variant] == weights and variant in summary]
    if not ours:
        raise ValueError(
            f"{path} is about other weights than this drafter's, by their SHA-256 (it measured "
            f"{printable(', '.join(measured))}): run `hsdraft bench --drafter` with this folder"
        )
    entry = {
        "settings": report.get("settings"),
        "ours": ours,
        "summary": {name: row for name, row in summary.items() if name != "plain"},
        "round": report.get("round", {}),
        "by_category": report.get("by_category"),
    }
    if not is_benchmark(entry):
        raise ValueError(f"{path} is no complete report of `hsdraft bench --json`: something a card shows is missing")
    ours.sort(key=lambda variant: (is_chain(variant), -summary[variant]["speed_up"]))
    return entry
