"""`hsdraft bench`, `throughput`, `first-calls`, `concurrent` and `lm-eval`."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.progress import errors, working
from ._shared import (
    QUESTION,
    DeviceOption,
    DrafterOption,
    DraftersOption,
    Dtype,
    DtypeOption,
    JsonOption,
    LimitOption,
    NewTokensOption,
    PlainOption,
    PromptFileOption,
    TargetOption,
    TemperatureOption,
    check_fit,
    console,
    drafter_of,
    load_pair,
    load_plain_or_pair,
    loaded_target,
    numbers,
    prompt_texts,
    say,
)

app = typer.Typer()


@app.command(short_help="Compare plain decoding, drafting and other systems.")
def bench(
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            help="JSONL with `turns`, a folder or file of SPEED-Bench, or speed-bench to find it; default: 6 prompts "
            "that come with the package.",
        ),
    ] = None,
    target: TargetOption = None,
    drafter: DraftersOption = None,
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated: default, untrained, chain, chain3 (depth), tree, tree8x3 (nodes, depth), any "
            "+ensemble, +resample, +ngrams, +cost or +option=value; chains (of 1 to 7 tokens); lookup, static, packed, "
            "cacheback, draft-model=FOLDER, mtp, dflash=FOLDER, economize-lookup, economize-eagle3=FOLDER, "
            "economize-hybrid=FOLDER."
        ),
    ] = "default,chain,lookup",
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling, set before each call; each prompt adds 1.")] = 0,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Number of most likely tokens to sample from, 0 for all; default: the target's setting, or 50."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often every system decodes all prompts.")] = 1,
    context_lengths: Annotated[
        str | None, typer.Option(help="Measure prompts padded to these lengths in tokens too, e.g. 256,1024,4096.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Measure batches of these sizes too, e.g. 2,4,8,16,32.")
    ] = None,
    new_tokens: Annotated[
        str | None, typer.Option(help="Measure calls that emit this many tokens too, e.g. 1,4,8,16,32,64,128.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time the parts of a round too.")] = False,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    json_out: JsonOption = None,
    pictures: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for pictures; default: beside the JSON.")
    ] = None,
    economize: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Short for economize-eagle3=FOLDER and economize-eagle3=FOLDER:6:0.4."
        ),
    ] = None,
) -> None:
    """Compares plain decoding, drafting and other systems on the same prompts, in one process, in alternating order."""
    from ..bench.calls import Settings
    from ..bench.plan import BenchPlan, draw, run_plan
    from ..bench.prompts import NOTE
    from ..bench.report import print_report
    from ..bench.run import BATCH, CONTEXT, NEW
    from ..generate.by_name import found_for_targets

    names = (
        variants if economize is None else f"{variants},economize-eagle3={economize},economize-eagle3={economize}:6:0.4"
    )
    lists = {CONTEXT: context_lengths, BATCH: batch_sizes, NEW: new_tokens}
    points = {axis: numbers(text, f"--{axis.replace('_', '-')}", "1,2,4") for axis, text in lists.items() if text}
    settings = Settings(max_new_tokens, temperature, seed, top_k)
    given = drafter or [""]
    try:
        if len(set(given)) < len(given):
            raise ValueError(f"a drafter is named twice: {', '.join(given)}")
        plan = BenchPlan(prompts or [], names, settings, limit, repeats, points, profile, json_out, pictures)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not prompts:
        say(NOTE)
    loaded: dict[str, Any] = {}
    if plan.takes_drafter:
        model, tokenizer, loaded[given[0]] = load_pair(target, drafter[0] if drafter else None, dtype, device)
        for name in given[1:]:
            loaded[name] = found_for_targets(name, dtype.torch, device)(model)
            check_fit(loaded[name], model, tokenizer)
    else:
        model, tokenizer = loaded_target(target, dtype.torch, device)
    result = run_plan(plan, model, tokenizer, loaded, errors)
    print_report(result, console)
    draw(plan, result, console)


@app.command(short_help="Time batches with and without the drafter.")
def throughput(
    prompts: Annotated[list[Path], typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL with `turns`.")],
    target: TargetOption = None,
    drafter: DrafterOption = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16",
    calls: Annotated[int, typer.Option(min=1, help="Batches to time per size.")] = 4,
    max_new_tokens: NewTokensOption = 64,
    tree_size: Annotated[
        int | None, typer.Option(min=1, help="Tree nodes per round and row; default: the drafter's.")
    ] = None,
    num_assistant_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft depth; default: the drafter's.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Times batches of prompts with and without the drafter, sides alternating in one process."""
    from ..bench.calls import Settings
    from ..bench.prompts import read_questions
    from ..bench.report import define, sweep_glossary, sweep_table
    from ..bench.run import BATCH, SweepPoint, check_points, sweep
    from ..bench.systems import System

    sizes = numbers(batch_sizes, "--batch-sizes", "1,2,4")
    texts = [question.turns[0] for question in read_questions(prompts)]
    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    for name, value in (("tree_size", tree_size), ("num_assistant_tokens", num_assistant_tokens)):
        if value is not None:
            setattr(loaded.generation_config, name, value)
    check_points(model, tokenizer, texts, {BATCH: sizes}, max_new_tokens)
    systems = [System("drafted", {"assistant_model": loaded}, loaded, ours=True)]
    points: list[SweepPoint] = []
    with working("timing batches"):
        for size in sizes:
            points += sweep(model, tokenizer, systems, texts[: size * calls], BATCH, [size], Settings(max_new_tokens))
    console.print(sweep_table(BATCH, points))
    define(console, sweep_glossary(BATCH))


@app.command("first-calls", short_help="Time the first call of a process.")
def first_calls(
    lengths: Annotated[str, typer.Option(help="Numbers of new tokens, comma-separated.")] = "8,32,128",
    repeats: Annotated[int, typer.Option(min=1, help="Processes per length, plain and drafted.")] = 3,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = QUESTION,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Times the first call of a process, plain and with the drafter, each in a fresh process."""
    from ..bench.processes import Pair, print_first_calls, run_first_calls

    counts = numbers(lengths, "--lengths", "1,2,4")
    pair = Pair(target, drafter_of(target, drafter), dtype.torch, device)
    with working("timing first calls"):
        found = run_first_calls(pair, prompt, counts, repeats)
    print_first_calls(found, console)


@app.command(short_help="Measure the memory of several calls at once.")
def concurrent(
    calls: Annotated[str, typer.Option(help="Numbers of concurrent calls, comma-separated.")] = "1,2,4,8",
    prompts: PromptFileOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of new tokens per prompt.")] = 128,
    packed_weights: Annotated[
        bool | None, typer.Option(help="Pack weights in the first round, or never; default: the drafter's setting.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Measures the memory of concurrent calls, each number of calls in a fresh process."""
    from ..bench.processes import Pair, print_concurrent, run_concurrent

    counts = numbers(calls, "--calls", "1,2,4")
    pair = Pair(target, drafter_of(target, drafter), dtype.torch, packed_weights=packed_weights)
    with working("measuring memory"):
        found = run_concurrent(pair, prompt_texts(prompts), counts, max_new_tokens)
    print_concurrent(found, console)


@app.command("lm-eval", short_help="Evaluate a target on lm_eval's tasks.")
def lm_eval(
    tasks: Annotated[str, typer.Option(help="Names of lm_eval's tasks or YAML files, comma-separated.")],
    target: TargetOption = None,
    drafter: DrafterOption = None,
    batch_size: Annotated[str, typer.Option(help="Texts per call, or `auto`.")] = "1",
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Largest batch that `auto` tries; default: 64.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with your tasks.")
    ] = None,
    limit: Annotated[float | None, typer.Option(min=1e-6, help="Documents per task; below 1, a share of them.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples per prompt; default: the task's.")] = None,
    gen_kwargs: Annotated[
        str | None, typer.Option(help="Arguments for generate(), e.g. do_sample=True,temperature=0.7.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Format prompts as chats.")
    ] = False,
    plain: PlainOption = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run both without and with the drafter.")] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="File for lm_eval's results; with --compare, of both runs.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Evaluates a target on tasks of lm-evaluation-harness, with drafting."""
    if find_spec("lm_eval") is None:
        raise ImportError("`hsdraft measure lm-eval` needs lm_eval: pip install -e '.[lm-eval]' in a checkout")
    if plain and compare:
        raise typer.BadParameter("--compare runs with the drafter too: leave --plain out", param_hint="--plain")
    if not re.fullmatch(r"[1-9]\d*|auto(:[1-9]\d*)?", batch_size):
        raise typer.BadParameter(f"expected a number or auto, found {batch_size}", param_hint="--batch-size")
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    from ..bench.lm_eval_model import compare as compared
    from ..bench.lm_eval_model import run_tasks

    if json_out is not None and (json_out.is_dir() or not json_out.parent.is_dir()):
        raise typer.BadParameter(f"{json_out} cannot be written: expected a file in a folder", param_hint="--json")
    manager = TaskManager(include_path=include_path)
    names = [name for name in tasks.split(",") if name]
    _check_tasks(names, manager)
    model, tokenizer, loaded = load_plain_or_pair(target, drafter, dtype, device, plain)
    options: dict[str, Any] = {
        "limit": limit, "num_fewshot": num_fewshot, "gen_kwargs": gen_kwargs, "max_batch_size": max_batch_size,
        "apply_chat_template": apply_chat_template, "task_manager": manager,
    }  # fmt: skip
    runs = []
    for drafts in [None, loaded] if compare else [loaded]:
        runs.append(run_tasks(model, tokenizer, drafts, names, batch_size, **options))
        say(str(runs[-1]))
    if compare:
        say(str(compared(*runs)))
    if json_out is not None:
        results = [run.results_with_drafting() for run in runs]
        document = dict(zip(("plain", "drafted"), results, strict=True)) if compare else results[0]
        written = json.dumps(document, indent=2, default=handle_non_serializable)
        json_out.write_text(written, encoding="utf-8")


def _check_tasks(names: list[str], manager: Any) -> None:
    unknown = [name for name in names if not manager.match_tasks([name]) and not Path(name).is_file()]
    if unknown:
        said = f"lm_eval has no task {', '.join(unknown)}; a task of your own needs --include-path FOLDER"
        raise typer.BadParameter(said, param_hint="--tasks")
    if not names:
        raise typer.BadParameter("expected the name of a task", param_hint="--tasks")
