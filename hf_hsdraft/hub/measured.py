"""`hsdraft card`: enters measurements into a drafter's `figures.json` and draws its card anew."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..drafter_files import digests, read_json
from ..model_card import FIGURES
from ..training.files import write_json
from ..training.pictures import draw_speed_up


def enter_benchmarks(folder: Path, reports: Sequence[Path]) -> list[dict[str, Any]]:
    """Puts what `hsdraft bench --json` wrote into a drafter's figures; those entered before are replaced.

    Raises:
        ValueError: a report is none, or is about other weights.
    """
    weights = digests(folder)
    entered = [_entry(path, read_json(path), weights) for path in reports]
    figures = read_json(folder / FIGURES) if (folder / FIGURES).is_file() else {}
    if "history" in figures:  # as runs wrote it before there was anything else to hold
        figures = {"training": figures}
    write_json(folder / FIGURES, {**figures, "benchmarks": entered})
    draw_speed_up(entered, folder)
    return entered


def _entry(path: Path, report: Mapping[str, Any], weights: Mapping[str, str]) -> dict[str, Any]:
    missing = sorted({"settings", "summary", "by_category", "weights"} - report.keys())
    if missing:
        raise ValueError(f"{path} is no report of `hsdraft bench --json`: it has no {', '.join(missing)}")
    ours = [variant for variant, measured in report["weights"].items() if measured == weights]
    if not ours:
        raise ValueError(f"{path} is about other weights than {json.dumps(dict(weights))}: measure this drafter")
    best = max(ours, key=lambda variant: report["summary"][variant]["speed_up"])
    return {
        "settings": {name: value for name, value in report["settings"].items() if name != "variants"},
        "ours": [best, *(variant for variant in ours if variant != best)],
        "summary": {name: row for name, row in report["summary"].items() if name != "plain"},
        "round": report.get("round", {}),
        "by_category": report["by_category"],
    }
