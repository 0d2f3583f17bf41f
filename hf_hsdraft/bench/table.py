"""`hsdraft bench`: a table over a prompt file, sides alternating in one process."""

from __future__ import annotations

import copy
import json
import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..configuration_hsdraft import public_name
from ..decoding import DraftStatistics
from ..modeling_hsdraft import HSDrafter
from ..training.conversations import Prompt
from .measure import DEFINITIONS, Divergence, encode_prompt, first_divergence

_VARIANT = re.compile(r"(chain|tree)(\d+)?(?:x(\d+))?(?:\+(none|ensemble|resample))?(\+ngrams)?")
TIE_MARGIN = 1e-3  # below this, top-1/top-2 margins are rounding: a divergence there is a tie


@dataclass(frozen=True)
class Variant:
    """One way of decoding that is compared with plain `generate()`.

    Attributes:
        name: row of the table.
        drafter: `None` for transformers' prompt lookup.
        options: set on `drafter.generation_config` for the call and taken back after it.
        decode: decodes instead of `generate()`: from token ids and new tokens to the whole text.
    """

    name: str
    drafter: HSDrafter | None
    options: dict[str, Any] = field(default_factory=dict)
    decode: Callable[[torch.Tensor, int], torch.Tensor] | None = None

    @classmethod
    def parse(cls, text: str, label: str = "", drafter: HSDrafter | None = None) -> Variant:
        """Reads `chain`, `tree`, `tree8` (nodes), `tree8x3` (and depth), any `+ensemble` or `+resample`, then `+ngrams`
        for nodes out of the text; or `lookup`.

        Raises:
            ValueError: the text is none of these.
        """
        if text == "lookup":
            return cls("prompt lookup (transformers)", None)
        match = _VARIANT.fullmatch(text)
        if match is None:
            raise ValueError(f"unknown variant {text!r}: expected such as chain, tree, tree8x3+ngrams, lookup")
        kind, size, depth, reuse, ngrams = match.groups()
        options: dict[str, Any] = {"reuse": reuse or "none", "ngram_length": 4 if ngrams else 0}
        if drafter is not None:
            config = drafter.config
            options["beam_width"] = 1 if kind == "chain" else max(config.beam_width, 2)
            options["tree_size"] = int(size or config.tree_size)
            options["num_assistant_tokens"] = int(depth or config.num_draft_steps)
        return cls(f"{label}: {text}" if label else text, drafter, options)

    def generate_kwargs(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": 10} if self.drafter is None else {"assistant_model": self.drafter}


@dataclass
class Run:
    """One prompt by one variant; `statistics` is `None` where transformers decodes."""

    tokens: int
    seconds: float
    forwards: int
    statistics: DraftStatistics | None
    divergence: Divergence | None


@dataclass
class BenchResult:
    """All runs: `runs[variant name][i]` and `plain[i]` belong to `questions[i]`.

    `weights` are the digests of the drafter of each variant, so that figures cannot be taken for another one's.
    """

    settings: dict[str, Any]
    weights: dict[str, Any]
    categories: list[str]
    plain: list[Run]
    runs: dict[str, list[Run]]


def spread(questions: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` questions taken in turn from all categories, in file order within each."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    rounds = max((len(group) for group in groups.values()), default=0)
    ordered = [group[turn] for turn in range(rounds) for group in groups.values() if turn < len(group)]
    return ordered[:limit]


def run_bench(
    target: Any,
    tokenizer: Any,
    variants: Sequence[Variant],
    questions: Sequence[Prompt],
    limit: int | None,
    max_new_tokens: int,
    console: Console,
    json_out: Path | None = None,
    source: str = "",
    command: str = "",
) -> BenchResult:
    """Greedy decoding of the first turn of each question, plain and by every variant, alternating per question.

    Args:
        json_out: all figures so far are written here after each question, so a run that is cut short is not lost.
        source, command: names of the prompt files and how the run was started, for the report.
    """
    chosen = spread(questions, limit)
    if not chosen:
        raise ValueError("no questions: the prompt files hold no line with `turns`")
    result = BenchResult(
        settings={
            "target": public_name(getattr(target, "name_or_path", "")),
            "prompts": source,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "processor": processor(target.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "questions": len(chosen),
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
            "variants": {variant.name: variant.options for variant in variants},
            "command": command,
        },
        weights={v.name: v.drafter.config.weights_digest for v in variants if v.drafter is not None},
        categories=[question.category for question in chosen],
        plain=[],
        runs={variant.name: [] for variant in variants},
    )
    _warm_up(target, tokenizer, variants, chosen[0])
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("bench", total=len(chosen) * (len(variants) + 1))
        for question in chosen:
            inputs = encode_prompt(tokenizer, question.turns[0], target.device)
            plain, run = _time_call(target, inputs, None, max_new_tokens)
            result.plain.append(run)
            progress.advance(task)
            for variant in variants:
                output, run = _time_call(target, inputs, variant, max_new_tokens)
                run.divergence = first_divergence(target, inputs["input_ids"].shape[1], plain, output)
                result.runs[variant.name].append(run)
                progress.advance(task)
            if json_out is not None:
                write_json(result, json_out)
    return result


def processor(device: torch.device) -> str:
    """What the figures were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names, flags = (re.findall(rf"^{field}\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE) for field in ("model name", "flags"))
    name = names[0] if names else platform.processor() or platform.machine()
    units = " with AMX" if flags and "amx_bf16" in flags[0] else ""
    return f"{os.cpu_count()} cores of {name}{units} ({torch.backends.cpu.get_cpu_capability()})"


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _warm_up(target: Any, tokenizer: Any, variants: Sequence[Variant], question: Prompt) -> None:
    inputs = encode_prompt(tokenizer, question.turns[0], target.device)
    for variant in (None, *variants):
        _time_call(target, inputs, variant, 4)


def _time_call(
    target: Any, inputs: dict[str, torch.Tensor], variant: Variant | None, max_new_tokens: int
) -> tuple[torch.Tensor, Run]:
    kwargs = {"do_sample": False, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    kwargs |= variant.generate_kwargs() if variant is not None else {}
    drafter = variant.drafter if variant is not None else None
    stored = copy.deepcopy(drafter.generation_config) if drafter is not None else None
    counter = _ForwardCounter(target)
    try:
        if drafter is not None and variant is not None:
            for name, value in variant.options.items():
                setattr(drafter.generation_config, name, value)
        _synchronise(target.device)
        begin = time.perf_counter()
        if variant is not None and variant.decode is not None:
            output, statistics = variant.decode(inputs["input_ids"], max_new_tokens), None
        else:
            generated = target.generate(**inputs, **kwargs)
            output, statistics = generated.sequences, getattr(generated, "statistics", None)
        _synchronise(target.device)
        seconds = time.perf_counter() - begin
    finally:
        counter.remove()
        if drafter is not None:
            drafter.generation_config = stored
    tokens = output.shape[1] - inputs["input_ids"].shape[1]
    return output, Run(tokens, seconds, counter.count, statistics, None)


class _ForwardCounter:
    """Counts the target's forwards, whoever calls them: tau of every side comes from the same count.

    A forward is a call of the first decoder layer; not everyone calls the model as a whole.
    """

    def __init__(self, target: Any) -> None:
        self.count = 0
        layers = getattr(target.base_model, "layers", None)
        self._handle = (target if layers is None else layers[0]).register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def remove(self) -> None:
        self._handle.remove()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Summary:
    """One row of the table, over all questions or one category."""

    tau: float
    tokens_per_second: float
    speed_up: float
    identical: int
    ties: int
    divergent: int


def summarise(runs: Sequence[Run], plain: Sequence[Run]) -> Summary:
    """Figures of some runs, each pooled: sums over sums, not means of ratios."""
    speed = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
    plain_speed = sum(run.tokens for run in plain) / sum(run.seconds for run in plain)
    differing = [run.divergence for run in runs if run.divergence is not None]
    ties = sum(divergence.margin < TIE_MARGIN for divergence in differing)
    return Summary(
        tau=sum(run.tokens for run in runs) / sum(run.forwards for run in runs),
        tokens_per_second=speed,
        speed_up=speed / plain_speed,
        identical=len(runs) - len(differing),
        ties=ties,
        divergent=len(differing) - ties,
    )


def by_category(result: BenchResult, runs: Sequence[Run]) -> dict[str, Summary]:
    """Figures of one variant's runs, category by category."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, category in enumerate(result.categories[: len(runs)]):
        groups[category].append(index)
    return {
        category: summarise([runs[index] for index in group], [result.plain[index] for index in group])
        for category, group in groups.items()
    }


def round_costs(runs: Sequence[Run]) -> dict[str, float]:
    """Milliseconds per round by part, and acceptance per depth: the share of rounds that got that far."""
    calls = [run.statistics for run in runs if run.statistics is not None]
    rounds = sum(call.rounds for call in calls)
    if not rounds:
        return {}
    costs = {
        part: 1e3 * sum(getattr(call, f"{part}_seconds") for call in calls) / rounds
        for part in ("draft", "verify", "commit")
    }
    total = 1e3 * sum(call.total_seconds - call.prefill_seconds for call in calls) / rounds
    costs["other"] = total - sum(costs.values())
    lengths = [length for call in calls for length in call.accepted_lengths]
    for depth in range(1, max(lengths, default=0) + 1):
        costs[f"depth_{depth}"] = sum(length >= depth for length in lengths) / rounds
    return costs


def print_table(result: BenchResult, console: Console) -> None:
    """Prints the comparison, the costs of a round, tau per category and every divergence."""
    settings = result.settings
    console.print(
        ", ".join(f"{name}={value}" for name, value in settings.items() if name != "variants"),
        style="dim",
        highlight=False,
    )
    table = Table("variant", "tau", "tokens/s", "speed-up", "identical", "ties", "divergent")
    for name, runs in {"plain": result.plain, **result.runs}.items():
        row = summarise(runs, result.plain)
        table.add_row(
            name,
            f"{row.tau:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speed_up:.2f}",
            *map(str, (row.identical, row.ties, row.divergent)),
        )
    console.print(table)
    _print_costs(result, console)
    _print_categories(result, console)
    for name, runs in result.runs.items():
        for index, run in enumerate(runs):
            if run.divergence is not None:
                console.print(f"{name}, question {index} ({result.categories[index]}): {run.divergence}")
    console.print(DEFINITIONS, style="dim", highlight=False)
    console.print(
        f"identical, ties, divergent: texts equal to the plain one; parted where the target's top-1/top-2 margin is "
        f"below {TIE_MARGIN}; parted elsewhere.",
        style="dim",
        highlight=False,
    )


def _print_costs(result: BenchResult, console: Console) -> None:
    costs = {name: round_costs(runs) for name, runs in result.runs.items()}
    depths = max((sum(key.startswith("depth_") for key in row) for row in costs.values()), default=0)
    if not depths:
        return
    parts = ("draft", "verify", "commit", "other")
    table = Table("per round", *(f"{part} ms" for part in parts), *(f"accept {d}" for d in range(1, depths + 1)))
    for name, row in costs.items():
        if row:
            cells = [f"{row[part]:.1f}" for part in parts]
            cells += [f"{row.get(f'depth_{depth}', 0.0):.2f}" for depth in range(1, depths + 1)]
            table.add_row(name, *cells)
    console.print(table)


def _print_categories(result: BenchResult, console: Console) -> None:
    columns = [by_category(result, runs) for runs in result.runs.values()]
    if len(set(result.categories)) < 2 or not columns:
        return
    table = Table("tau (speed-up) by category", *result.runs)
    for category in columns[0]:
        rows = [column[category] for column in columns]
        table.add_row(category or "(none)", *(f"{row.tau:.2f} ({row.speed_up:.2f})" for row in rows))
    console.print(table)


def write_json(result: BenchResult, path: Path) -> None:
    """Writes settings, definitions, summaries and all single runs; replaces the file only when complete."""
    rows = {"plain": result.plain, **result.runs}
    document = {
        "definitions": DEFINITIONS,
        "settings": result.settings,
        "weights": result.weights,
        "summary": {name: asdict(summarise(runs, result.plain)) for name, runs in rows.items()},
        "by_category": {
            name: {category: asdict(row) for category, row in by_category(result, runs).items()}
            for name, runs in result.runs.items()
        },
        "round": {name: round_costs(runs) for name, runs in result.runs.items()},
        "categories": result.categories,
        "runs": {name: [asdict(run) for run in runs] for name, runs in rows.items()},
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
