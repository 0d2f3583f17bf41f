"""`hsdraft bench`: the user's request, checked before any model is loaded, and the run itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from ..core.checks import public_name
from ..drafters.base.protocol import Drafter
from ..runtime.prompt_inputs import encode_prompts
from ..training.data.conversations import Prompt, read_prompts
from .calls import Settings
from .default_prompts import DEFAULT_PROMPTS
from .machine import processor
from .profile import profile
from .report import BenchResult, write_report
from .run import Measured, measure, spread
from .sweeps import BATCH, CONTEXT, NEW, check_points, sweep
from .systems import PLAIN, System, Variant, make_systems, parse_variants

PROFILED = 8  # greatest number of prompts in a profile


@dataclass(frozen=True)
class BenchPlan:
    """What `hsdraft bench` is to do.

    Attributes:
        prompts: prompt files; the embedded prompts if empty.
        variants: comma-separated names, see `systems.Variant`.
        limit: greatest number of prompts, taken evenly from all categories; `None` for all.
        temperature, seed, top_k: see `Settings`; the seed is that of the first prompt.
        repeats: how often every system decodes all prompts.
        context_lengths, batch_sizes, new_tokens: points of these sweeps; empty for none.
        profile: whether to time the parts of a round too, for each variant of ours.
        pictures: folder of the pictures; `None` for the report's.
    """

    prompts: Sequence[Path]
    variants: str
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1
    context_lengths: Sequence[int] = ()
    batch_sizes: Sequence[int] = ()
    profile: bool = False
    json_out: Path | None = None
    pictures: Path | None = None
    new_tokens: Sequence[int] = ()
    top_k: int | None = None
    parsed: list[Variant] = field(init=False)
    questions: list[Prompt] = field(init=False)

    def __post_init__(self) -> None:
        """Parses the variants' names and reads the prompts.

        Raises a ValueError if something in the plan is impossible, an ImportError if a package is missing.
        """
        object.__setattr__(self, "parsed", parse_variants(self.variants))
        if self.json_out is not None and not self.json_out.parent.is_dir():
            raise ValueError(f"no such folder for --json: {self.json_out.parent}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature} is invalid: expected 0 (greedy) or more")
        if self.top_k is not None and (self.top_k < 0 or not self.temperature):
            raise ValueError(
                f"--top-k {self.top_k} is invalid: expected 0 (all tokens) or more, with a --temperature above 0"
            )
        if self.profile and not self.takes_drafter:
            raise ValueError("--profile times the rounds of our decoding: name a variant such as tree or default too")
        for axis, values in self.points.items():
            name = "--" + axis.replace("_", "-")
            if any(value < 1 for value in values) or len(set(values)) < len(values):
                raise ValueError(f"{name}: expected different whole numbers of 1 or more, found {list(values)}")
        if self.pictures is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--pictures needs matplotlib: pip install -e '.[bench]' in a checkout")
        found = [prompt for path in self.prompts for prompt in read_prompts(path)] if self.prompts else DEFAULT_PROMPTS
        questions = spread(found, self.limit)
        if not questions:
            raise ValueError("no questions: the prompt files hold no line with `turns`")
        object.__setattr__(self, "questions", questions)

    @property
    def takes_drafter(self) -> bool:
        return any(variant.drafts for variant in self.parsed)

    @property
    def texts(self) -> list[str]:
        return [question.turns[0] for question in self.questions]

    @property
    def points(self) -> dict[str, Sequence[int]]:
        return {CONTEXT: self.context_lengths, BATCH: self.batch_sizes, NEW: self.new_tokens}

    def settings(self) -> Settings:
        return Settings(self.max_new_tokens, self.temperature, self.seed, self.top_k)

    def command(self, dtype: str) -> str:
        """Returns the command line of this plan, without local paths."""
        parts = [f"--prompts {path.name}" for path in self.prompts]
        parts += [] if self.limit is None else [f"--limit {self.limit}"]
        parts += [f"--max-new-tokens {self.max_new_tokens}", f"--dtype {dtype}"]
        parts += [f"--variants {','.join(variant.public_text for variant in self.parsed)}"]
        parts += [f"--temperature {self.temperature} --seed {self.seed}"] if self.temperature else []
        parts += [] if self.top_k is None else [f"--top-k {self.top_k}"]
        parts += [f"--repeats {self.repeats}"] if self.repeats > 1 else []
        for axis, values in self.points.items():
            parts += [f"--{axis.replace('_', '-')} {','.join(map(str, values))}"] if values else []
        parts += ["--profile"] if self.profile else []
        return " ".join(["hsdraft bench", *parts])


def whole_numbers(text: str | None, option: str) -> list[int]:
    """Returns the numbers of a comma-separated list; raises a ValueError for anything else."""
    try:
        return [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option}: expected numbers such as 1,2,4, found {text!r}") from None


def run_plan(
    plan: BenchPlan, target: Any, tokenizer: Any, drafters: dict[str, Drafter], console: Console
) -> BenchResult:
    """Measures everything in a plan. The report is written after each prompt, so an interrupted run keeps it.

    `drafters` are by label; empty if no variant takes one. Raises a ValueError before measuring if a variant does
    not fit its drafter, or a sweep its target.
    """
    systems = make_systems(plan.parsed, target, drafters)
    texts = plan.texts
    check_points(target, tokenizer, texts, plan.context_lengths, plan.batch_sizes, plan.max_new_tokens, plan.new_tokens)
    result = BenchResult(
        settings=_settings(plan, target, systems),
        weights={
            system.name: getattr(system.drafter.config, "weights_digest", None) for system in systems if system.ours
        },
        categories=[question.category for question in plan.questions],
    )

    def save() -> None:
        if plan.json_out is not None:
            write_report(result, plan.json_out)

    inputs = encode_prompts(target, tokenizer, texts)
    points = sum(map(len, plan.points.values()))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("bench", total=len(inputs) * plan.repeats)

        def tell(measured: Measured) -> None:
            result.measured = measured
            progress.advance(task)
            save()

        result.measured = measure(target, systems, inputs, plan.settings(), plan.repeats, tell)
        able = [system for system in systems if system.name in result.measured.runs]
        if plan.profile:
            task = progress.add_task("profile", total=sum(system.ours for system in able))
            _add_profiles(result, able, target, inputs[:PROFILED], plan.settings(), lambda: progress.advance(task))
        if points:
            task = progress.add_task("sweeps", total=points)
        for axis, values in plan.points.items():
            for point in sweep(target, tokenizer, able, texts, axis, values, plan.settings(), plan.repeats):
                result.sweeps.setdefault(axis, []).append(point)
                progress.advance(task)
                save()
    save()
    return result


def _add_profiles(
    result: BenchResult,
    systems: Sequence[System],
    target: Any,
    inputs: Sequence[dict[str, torch.Tensor]],
    settings: Settings,
    tell: Callable[[], None],
) -> None:
    summaries = result.summaries()
    for system in systems:
        if not system.ours:
            continue
        found = profile(target, system, inputs, settings, summaries[system.name].decode_speed_up)
        if found is not None:
            result.profiles[system.name] = found
        tell()


def draw(plan: BenchPlan, result: BenchResult, console: Console) -> None:
    """Draws the pictures into `plan.pictures`, or beside the report. Without matplotlib it prints a note."""
    folder = plan.pictures or (plan.json_out and plan.json_out.parent)
    if folder is None:
        return
    from .plots import draw_bench

    try:
        paths = draw_bench(result, folder, "bench" if plan.json_out is None else plan.json_out.stem)
    except ImportError as error:
        console.print(f"no pictures: {error}", highlight=False, markup=False)
        return
    console.print(f"pictures: {', '.join(path.name for path in paths)}", highlight=False, markup=False)


def _settings(plan: BenchPlan, target: Any, systems: Sequence[System]) -> dict[str, Any]:
    return {
        "target": public_name(getattr(target, "name_or_path", "")),
        "prompts": ", ".join(path.name for path in plan.prompts) or "those of the package",
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "processor": processor(target.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "questions": len(plan.questions),
        "max_new_tokens": plan.max_new_tokens,
        "do_sample": plan.temperature > 0,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "top_k": plan.top_k,
        "repeats": plan.repeats,
        "systems": [PLAIN, *(system.name for system in systems)],
        "variants": {system.name: system.shown_options() for system in systems},
        "lossy": [system.name for system in systems if not system.exact],
        "command": plan.command(str(target.dtype).removeprefix("torch.")),
    }
