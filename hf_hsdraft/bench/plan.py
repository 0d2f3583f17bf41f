"""`hsdraft bench`: the user's request, checked before any model is loaded, and the run itself."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from ..core.checks import public_name
from ..core.methods import load
from ..core.progress import EVERY, Reporter
from ..drafters.base.protocol import Drafter
from ..runtime.prompt_inputs import encode_prompts
from ..training.data.conversations import Prompt
from ..training.files import write_json
from .calls import Measured, Settings, check_points, measure, processor, read_questions, sweep
from .report import BenchResult, as_document
from .systems import PLAIN, System, Variant, make_systems, parse_variants

PROFILED = 8  # greatest number of prompts in a profile


@dataclass(frozen=True)
class BenchPlan:
    """What `hsdraft bench` is to do."""

    prompts: Sequence[Path]  # prompt files; the prompts of the package if empty
    variants: str  # comma-separated names, see `systems.Variant`
    settings: Settings  # of all systems; the seed is that of the first prompt
    limit: int | None = None  # greatest number of prompts, taken evenly from all categories; `None` for all
    repeats: int = 1  # how often every system decodes all prompts
    points: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of the sweeps, by axis
    profile: bool = False  # whether to time the parts of a round too, for each variant of ours
    json_out: Path | None = None
    pictures: Path | None = None  # folder of the pictures; `None` for the report's
    parsed: list[Variant] = field(init=False)
    questions: list[Prompt] = field(init=False)

    def __post_init__(self) -> None:
        """Parses the variants' names and reads the prompts.

        Raises a ValueError if something in the plan is impossible, an ImportError if a package is missing.
        """
        object.__setattr__(self, "parsed", parse_variants(self.variants))
        heat, top_k = self.settings.temperature, self.settings.top_k
        if self.json_out is not None and not self.json_out.parent.is_dir():
            raise ValueError(f"no such folder for --json: {self.json_out.parent}")
        if not 0.0 <= heat < float("inf"):
            raise ValueError(f"--temperature {heat} is invalid: expected 0 (greedy) or more")
        if top_k is not None and (top_k < 0 or not heat):
            raise ValueError(
                f"--top-k {top_k} is invalid: expected 0 (all tokens) or more, with a --temperature above 0"
            )
        if self.profile and not self.takes_drafter:
            raise ValueError("--profile times the rounds of our decoding: name a variant such as tree or default too")
        for axis, values in self.points.items():
            if any(value < 1 for value in values) or len(set(values)) < len(values):
                found = f"found {list(values)}"
                raise ValueError(f"{_option(axis)}: expected different whole numbers of 1 or more, {found}")
        if self.pictures is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--pictures needs matplotlib: pip install -e '.[bench]' in a checkout")
        object.__setattr__(self, "questions", read_questions(self.prompts, self.limit))

    @property
    def takes_drafter(self) -> bool:
        return any(variant.system is None for variant in self.parsed)

    @property
    def texts(self) -> list[str]:
        return [question.turns[0] for question in self.questions]

    def command(self, dtype: str) -> str:
        """Returns the command line of this plan, without local paths."""
        how = self.settings
        parts = [f"--prompts {path.name}" for path in self.prompts]
        parts += [] if self.limit is None else [f"--limit {self.limit}"]
        parts += [f"--max-new-tokens {how.max_new_tokens}", f"--dtype {dtype}"]
        parts += [f"--variants {','.join(variant.public_text for variant in self.parsed)}"]
        parts += [f"--temperature {how.temperature} --seed {how.seed}"] if how.temperature else []
        parts += [] if how.top_k is None else [f"--top-k {how.top_k}"]
        parts += [f"--repeats {self.repeats}"] if self.repeats > 1 else []
        parts += [f"{_option(axis)} {','.join(map(str, values))}" for axis, values in self.points.items() if values]
        parts += ["--profile"] if self.profile else []
        return " ".join(["hsdraft bench", *parts])


def _option(axis: str) -> str:
    return f"--{axis.replace('_', '-')}"


def reporter(console: Console) -> Reporter:
    """Returns what reports progress on a console: bars in a terminal, lines elsewhere."""
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    return Reporter(say, EVERY, console if console.is_terminal else None)


def run_plan(
    plan: BenchPlan, target: Any, tokenizer: Any, drafters: dict[str, Drafter], console: Console
) -> BenchResult:
    """Measures everything in a plan. The report is written after each prompt, so an interrupted run keeps it.

    `drafters` are by label; empty if no variant takes one. Progress goes to `console`. Raises a ValueError before
    measuring if a variant does not fit its drafter, or a sweep its target.
    """
    profile = load("measuring", "profile").profile if plan.profile else None
    systems = make_systems(plan.parsed, target, drafters)
    check_points(target, tokenizer, plan.texts, plan.points, plan.settings.max_new_tokens)
    digests = {system.name: getattr(system.drafter.config, "weights_digest", None) for system in systems if system.ours}
    result = BenchResult(_settings(plan, target, systems), digests, plan.questions)

    def save() -> None:
        if plan.json_out is not None:
            write_json(plan.json_out, as_document(result))

    inputs = encode_prompts(target, tokenizer, plan.texts)
    report = reporter(console)
    with report.stage("bench", "prompts", len(inputs) * plan.repeats) as stage:

        def keep(measured: Measured) -> None:
            result.measured = measured
            stage.advance(stage.done + 1)
            save()

        result.measured = measure(target, systems, inputs, plan.settings, plan.repeats, keep)
    able = [system for system in systems if system.name in result.measured.runs]
    if profile is not None:
        summaries, ours = result.summaries(), [system for system in able if system.ours]
        with report.stage("profile", "variants", len(ours)) as stage:
            for system in ours:
                speed_up = summaries[system.name].decode_speed_up
                found = profile(target, system, inputs[:PROFILED], plan.settings, speed_up)
                if found is not None:
                    result.profiles[system.name] = found
                stage.advance(stage.done + 1)
    with report.stage("sweeps", "points", sum(map(len, plan.points.values()))) as stage:
        for axis, values in plan.points.items():
            for point in sweep(target, tokenizer, able, plan.texts, axis, values, plan.settings, plan.repeats):
                result.sweeps.setdefault(axis, []).append(point)
                stage.advance(stage.done + 1)
                save()
    save()
    return result


def draw(plan: BenchPlan, pictures: Callable[[Path, str], list[Path]], console: Console) -> None:
    """Draws the pictures into `plan.pictures`, or beside the report. Without matplotlib it prints a note.

    `pictures` takes the folder and the beginning of the names, and returns the paths.
    """
    folder = plan.pictures or (plan.json_out and plan.json_out.parent)
    if folder is None:
        return
    try:
        paths = pictures(folder, "bench" if plan.json_out is None else plan.json_out.stem)
    except ImportError as error:
        console.print(f"no pictures: {error}", highlight=False, markup=False)
        return
    console.print(f"pictures: {', '.join(path.name for path in paths)}", highlight=False, markup=False)


def _settings(plan: BenchPlan, target: Any, systems: Sequence[System]) -> dict[str, Any]:
    how, dtype = plan.settings, str(target.dtype).removeprefix("torch.")
    return {
        "target": public_name(getattr(target, "name_or_path", "")),
        "prompts": ", ".join(path.name for path in plan.prompts) or "the package's",
        "dtype": dtype,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "processor": processor(target.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "questions": len(plan.questions),
        "max_new_tokens": how.max_new_tokens,
        "do_sample": how.temperature > 0,
        "temperature": how.temperature,
        "seed": how.seed,
        "top_k": how.top_k,
        "repeats": plan.repeats,
        "systems": [PLAIN, *(system.name for system in systems)],
        "variants": {system.name: system.shown_options() for system in systems},
        "lossy": [system.name for system in systems if not system.exact],
        "command": plan.command(dtype),
    }
