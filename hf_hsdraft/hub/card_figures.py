"""The figures of a card: speed, acceptance of chains, and training. All text of files is untrusted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..verify.registry import is_lossy
from .drafter_files import FIGURES, read_json

GAP = "not measured"

_SPEED = (
    "tau: tokens emitted per target forward, bonus included (plain decoding: 1). speed-up: tokens/s over plain "
    "`generate()`, same settings and process, alternating. "
    "identical: texts equal to those of plain `generate()`."
)
_CHAINS = (
    "A chain of k drafts k tokens per round in a row, without a tree, n-grams or reuse. Acceptance length: tokens "
    "emitted per verifying forward, including the bonus token and excluding the prompt's forward, i.e. 1 + accepted "
    "drafted tokens / rounds. Chains end at the drafter's greatest depth."
)


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


def read_document(path: Path) -> dict[str, Any]:
    """Returns a JSON object; an empty one if the file is missing or damaged."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def figures_section(
    training: Mapping[str, Any] | None, benchmarks: Sequence[Mapping[str, Any]], name: str, from_scratch: bool
) -> str:
    """The training figures and the entries of `figures.json`, with definitions and commands, and visible gaps."""
    measured = [variant for benchmark in benchmarks for variant in benchmark["ours"]]
    blocks = [_SPEED, *(_benchmark(benchmark, name) for benchmark in benchmarks)]
    blocks += [] if any(not is_chain(variant) for variant in measured) else [f"Speed: {GAP}."]
    blocks += [] if any(is_chain(variant) for variant in measured) else [f"Acceptance of chains: {GAP}."]
    if training is not None:
        blocks.append(_held_out(training, from_scratch))
    return "\n\n".join(blocks)


def _benchmark(benchmark: Mapping[str, Any], drafter: str) -> str:
    settings, ours = benchmark["settings"], benchmark["ours"]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''}"
    how = (
        f"**{settings['dtype']}, {settings['max_new_tokens']} new tokens.** {settings['questions']} prompts of "
        f"{cell(settings.get('prompts') or 'a file that is not named')}, {_drawn(settings)}, "
        f"target {cell(settings.get('target') or 'not named')}; {cell(settings['processor'])}, "
        f"{threads}, device {settings['device']}; torch {settings['torch']}, transformers {settings['transformers']}."
    )
    trees = [variant for variant in ours if not is_chain(variant)]
    chains = sorted((variant for variant in ours if is_chain(variant)), key=chain_length)
    blocks = [how, *(_speed(benchmark, trees) if trees else []), *(_acceptance(benchmark, chains) if chains else [])]
    return "\n\n".join([*blocks, f"```bash\n{cell(settings['command'])} --drafter {drafter}\n```"])


def _speed(benchmark: Mapping[str, Any], ours: Sequence[str]) -> list[str]:
    """Speed of all variants and comparisons, and by category for the first one."""
    settings = benchmark["settings"]
    rows = [
        [
            _shape(name, settings) if name in ours else f"{name} (for comparison)",
            f"{row['tau']:.2f}",
            f"{row['speed_up']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            "no comparison" if row["identical"] is None else f"{row['identical']} of {settings['questions']}",
        ]
        for name, row in benchmark["summary"].items()
        if not is_chain(name)
    ]
    best = benchmark["by_category"].get(ours[0], {})
    shown = ", ".join(f"{name or 'none'} {row['tau']:.2f} ({row['speed_up']:.2f})" for name, row in best.items())
    by_category = [f"tau (speed-up) of {code(ours[0])} by category: {cell(shown)}."] if shown else []
    return [
        table(["", "tau", "speed-up", "tokens/s", "identical"], rows),
        *_share(benchmark["summary"], ours),
        *by_category,
    ]


def _share(summary: Mapping[str, Any], ours: Sequence[str]) -> list[str]:
    """Says how much of a speed-up greater than tau drafting can give at most."""
    more = [name for name in ours if summary[name]["speed_up"] > summary[name]["tau"]]
    if not more:
        return []
    shares = [f"{code(each)} at most {summary[each]['tau']:.2f} of {summary[each]['speed_up']:.2f}" for each in more]
    return [
        f"Drafting's share of the speed-up: {', '.join(shares)}. The rest is from packed weights and other operators."
    ]


def _acceptance(benchmark: Mapping[str, Any], chains: Sequence[str]) -> list[str]:
    """Acceptance lengths of chains (shortest first) by category, and the acceptance of each depth of the longest."""
    groups = benchmark["by_category"]
    rows = [("all prompts", [benchmark["summary"][name] for name in chains])]
    categories = list(groups.get(chains[0], {}))
    if len(categories) > 1:
        rows += [(each or "none", [groups.get(name, {}).get(each, {}) for name in chains]) for each in categories]
    lengths = [(title, *(shown_figure(row, "acceptance_length", ".2f") for row in found)) for title, found in rows]
    shares = benchmark["round"].get(chains[-1], {})
    depths = range(1, chain_length(chains[-1]) + 1)
    reached = {depth: shares.get(f"depth_{depth}", 0.0) for depth in depths}  # never accepted: absent
    after = {depth: reached[depth] / before if (before := reached.get(depth - 1, 1.0)) else None for depth in depths}
    by_depth = [
        ("accepted, share of all rounds", *(f"{reached[depth]:.2f}" for depth in depths)),
        ("accepted, if all before were", *(GAP if each is None else f"{each:.2f}" for each in after.values())),
    ]
    return [
        _CHAINS,
        table(["acceptance length", *(f"k = {chain_length(name)}" for name in chains)], lengths),
        f"Of {code(chains[-1])}, by depth:",
        table(["drafted token", *map(str, depths)], by_depth),
    ]


def _drawn(settings: Mapping[str, Any]) -> str:
    if not settings.get("do_sample"):
        return "greedy decoding (no seed needed)"
    top_k = settings.get("top_k")
    among = "" if top_k is None else " from all tokens" if top_k == 0 else f" from the top {cell(top_k)} tokens"
    return f"sampling at temperature {cell(settings.get('temperature'))}{among}, seed {cell(settings.get('seed'))}"


def _shape(variant: str, settings: Mapping[str, Any]) -> str:
    try:
        options = settings["variants"][variant]
        nodes, depth, width = (options[name] for name in ("tree_size", "num_assistant_tokens", "beam_width"))
    except (KeyError, TypeError):
        return variant
    lossy = ", lossy" if is_lossy(options.get("verification")) else ""
    return f"{variant} ({depth} deep{lossy})" if width == 1 else f"{variant} ({nodes} nodes, {depth} deep{lossy})"


def _held_out(training: Mapping[str, Any], from_scratch: bool) -> str:
    history = training["history"]
    last: Mapping[str, Any] = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    depths = sorted(int(key.rpartition("_")[2]) for key in last if re.fullmatch(r"eval_accuracy_\d{1,3}", key))
    accuracy = table(
        [
            "depth",
            "first choice right, given the true tokens",
            "a node of the tree accepted, if all depths before were",
        ],
        [
            (f"{depth}", shown_figure(last, f"eval_accuracy_{depth}"), shown_figure(last, f"eval_acceptance_{depth}"))
            for depth in depths
        ],
    )
    sizes = training.get("held_out")
    size = f" ({cell(sizes)})" if isinstance(sizes, str) else ""
    earlier = "The drafter that this run started from may have been trained on these conversations."
    return (
        f"**Held-out conversations of the training run{size}.** tau {shown_figure(last, 'eval_tau')} (greedy "
        f"decoding); loss {shown_figure(last, 'eval_loss')} nats. The distributions of training and of decoding "
        f"differ by at most {shown_figure(last, 'eval_parity')} (total variation; 0 means "
        f"equal).{'' if from_scratch else f' {earlier}'}\n\n{accuracy}"
    )


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
