"""The figures of a card, as rows of tables. All text of files is untrusted."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..verify.registry import is_lossy
from .drafter_files import FIGURES, read_document

GAP = "not measured"


def is_chain(variant: str) -> bool:
    """Whether a variant of `hsdraft bench` drafts only chains of a fixed length."""
    return chain_length(variant) > 0


def chain_length(variant: str) -> int:
    """The length of the chains that a variant drafts; 0 if it drafts anything else."""
    match = re.fullmatch(r"(?:.*: )?chain(\d{1,2})", variant)
    return int(match[1]) if match else 0


def read_figures(folder: Path) -> dict[str, Any]:
    """Measurements of the drafter in a folder; malformed ones count as not measured."""
    figures = read_document(folder / FIGURES)
    if "history" in figures:  # format 1
        figures = {"training": figures}
    benchmarks, training = figures.get("benchmarks"), figures.get("training")
    history = training.get("history") if isinstance(training, dict) else None
    whole = isinstance(history, list) and all(isinstance(entry, dict) for entry in history)
    return {
        "benchmarks": [each for each in benchmarks if is_benchmark(each)] if isinstance(benchmarks, list) else [],
        "training": training if whole else None,
    }


def is_benchmark(entry: Any) -> bool:
    """Whether an entry of `figures.json` has all that a card shows of it."""
    try:
        settings, rows = entry["settings"], entry["summary"]
        groups = [entry["by_category"].get(name, {}) for name in rows]
        numbers = [row[metric] for row in rows.values() for metric in ("tau", "speed_up", "tokens_per_second")]
        numbers += [row["acceptance_length"] for row in rows.values() if row.get("acceptance_length") is not None]
        numbers += [row[metric] for group in groups for row in group.values() for metric in ("tau", "speed_up")]
        texts = [settings[name] for name in ("dtype", "device", "torch", "transformers", "processor", "command")]
        counts = [settings[name] for name in ("questions", "max_new_tokens", "threads")]
        counts += [row["identical"] for row in rows.values() if row["identical"] is not None]
        rounds = [row.values() for row in entry.get("round", {}).values()]
        numbers += [number for row in rounds for number in row]
        ours = entry["ours"]
        return (
            all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(count, int) for count in counts)
            and all(isinstance(settings.get(name, ""), str) for name in ("prompts", "target"))
            and isinstance(ours, list)
            and bool(ours)
            and all(name in rows for name in ours)
        )
    except (KeyError, TypeError, AttributeError, OverflowError):
        return False


def shown_benchmark(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """What a card shows of an entry of `figures.json`: its settings, and rows of speed and of chains."""
    settings, ours, summary = benchmark["settings"], benchmark["ours"], benchmark["summary"]
    trees = [variant for variant in ours if not is_chain(variant)]
    chains = sorted((variant for variant in ours if is_chain(variant)), key=chain_length)
    shown: dict[str, Any] = {"settings": settings, "trees": trees, "chains": chains}
    if trees:
        best = benchmark["by_category"].get(trees[0], {})
        shown["speed"] = [
            (
                _shape(name, settings) if name in ours else f"{name} (for comparison)",
                f"{row['tau']:.2f}",
                f"{row['speed_up']:.2f}",
                f"{row['tokens_per_second']:.1f}",
                "no comparison" if row["identical"] is None else f"{row['identical']} of {settings['questions']}",
            )
            for name, row in summary.items()
            if not is_chain(name)
        ]
        # Of a speed-up greater than tau, drafting can give at most tau.
        shares = {name: (summary[name]["tau"], summary[name]["speed_up"]) for name in trees}
        shown["shares"] = [
            f"{code(name)} at most {tau:.2f} of {up:.2f}" for name, (tau, up) in shares.items() if up > tau
        ]
        shown["by_category"] = [
            f"{name or 'none'} {row['tau']:.2f} ({row['speed_up']:.2f})" for name, row in best.items()
        ]
    if chains:
        shown |= {"lengths": _lengths(benchmark, chains), "depths": _depths(benchmark, chains[-1])}
    return shown


def _lengths(benchmark: Mapping[str, Any], chains: Sequence[str]) -> list[list[str]]:
    """Acceptance lengths of chains, shortest first, by category, below a line of titles."""
    groups = benchmark["by_category"]
    rows = [("all prompts", [benchmark["summary"][name] for name in chains])]
    categories = list(groups.get(chains[0], {}))
    if len(categories) > 1:
        rows += [(each or "none", [groups.get(name, {}).get(each, {}) for name in chains]) for each in categories]
    titles = ["acceptance length", *(f"k = {chain_length(name)}" for name in chains)]
    return [
        titles,
        *([title, *(shown_figure(row, "acceptance_length", ".2f") for row in found)] for title, found in rows),
    ]


def _depths(benchmark: Mapping[str, Any], chain: str) -> list[list[str]]:
    """The acceptance of each depth of a chain, below a line of titles."""
    shares, depths = benchmark["round"].get(chain, {}), range(1, chain_length(chain) + 1)
    reached = [shares.get(f"depth_{depth}", 0.0) for depth in depths]  # never accepted: absent
    after = [f"{one / before:.2f}" if before else GAP for before, one in itertools.pairwise([1.0, *reached])]
    return [
        ["drafted token", *map(str, depths)],
        ["accepted, share of all rounds", *(f"{each:.2f}" for each in reached)],
        ["accepted, if all before were", *after],
    ]


def _shape(variant: str, settings: Mapping[str, Any]) -> str:
    try:
        options = settings["variants"][variant]
        nodes, depth, width = (options[name] for name in ("tree_size", "num_assistant_tokens", "beam_width"))
    except (KeyError, TypeError):
        return variant
    lossy = ", lossy" if is_lossy(options.get("verification")) else ""
    return f"{variant} ({depth} deep{lossy})" if width == 1 else f"{variant} ({nodes} nodes, {depth} deep{lossy})"


def held_out(training: Mapping[str, Any]) -> dict[str, Any]:
    """What a card shows of the last evaluation on held-out conversations."""
    last: Mapping[str, Any] = next((entry for entry in reversed(training["history"]) if "eval_loss" in entry), {})
    depths = sorted(int(key.rpartition("_")[2]) for key in last if re.fullmatch(r"eval_accuracy_\d{1,3}", key))
    size = training.get("held_out")
    return {
        "size": size if isinstance(size, str) else "",
        "depths": [
            (f"{depth}", shown_figure(last, f"eval_accuracy_{depth}"), shown_figure(last, f"eval_acceptance_{depth}"))
            for depth in depths
        ],
        **{name: shown_figure(last, f"eval_{name}") for name in ("tau", "loss", "parity")},
    }


def shown_figure(entry: Mapping[str, Any], name: str, digits: str = ".4g") -> str:
    """The figure in this format, or that it was not measured."""
    value = entry.get(name)
    return f"{value:{digits}}" if isinstance(value, int | float) and abs(value) < 1e300 else GAP


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(each) for each in line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value on one line, as it may stand in a table."""
    return " ".join(str(value).replace("|", "\\|").split())


def code(text: str) -> str:
    return f"`{cell(text).replace('`', '')}`"
