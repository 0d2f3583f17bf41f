"""`hsdraft bench`, `measure throughput` and `check`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench import VARIANTS
from ..core.methods import load
from ..core.progress import errors, working
from . import _shared as shared
from ._shared import Dtype, check_fit, console, drafter_of, load_pair, loaded_target, numbers, option, prompt_texts, say

app = typer.Typer()
_FAILED = "FAILED"


@app.command(short_help="Compare plain decoding, drafting and other systems.")
def bench(
    prompts: Annotated[
        list[Path] | None, option("JSONL with `turns`; default: 6 prompts that come with the package.", "--prompts")
    ] = None,
    target: shared.TargetOption = None,
    drafter: shared.DraftersOption = None,
    limit: shared.LimitOption = None,
    max_new_tokens: shared.NewTokensOption = 128,
    variants: Annotated[
        str | None, option(f"Comma-separated: {VARIANTS}. Default: default,chain,lookup; with --cold: default.")
    ] = None,
    temperature: shared.TemperatureOption = 0.0,
    seed: Annotated[int, option("Seed for sampling, set before each call; each prompt adds 1.")] = 0,
    top_k: Annotated[
        int | None,
        option("Number of most likely tokens to sample from, 0 for all; default: the target's setting, or 50."),
    ] = None,
    repeats: Annotated[int, option("How often every system decodes all prompts.", min=1)] = 1,
    context_lengths: Annotated[
        str | None, option("Measure prompts padded to these lengths in tokens too, e.g. 256,1024,4096.")
    ] = None,
    batch_sizes: Annotated[str | None, option("Measure batches of these sizes too, e.g. 2,4,8,16,32.")] = None,
    new_tokens: Annotated[
        str | None, option("Measure calls that emit this many tokens too, e.g. 1,4,8,16,32,64,128.")
    ] = None,
    profile: Annotated[bool, option("Time the parts of a round too.", "--profile")] = False,
    cold: Annotated[
        bool,
        option(
            "Time the first calls of a process without compiled code instead; plain decoding and each variant "
            "in a separate process.",
            "--cold",
        ),
    ] = False,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
    json_out: shared.JsonOption = None,
    pictures: Annotated[Path | None, option("Folder for pictures; default: beside the JSON.", file_okay=False)] = None,
) -> None:
    """Compares plain decoding, drafting and other systems on the same prompts, in one process, in alternating order."""
    from ..bench.calls import BATCH, CONTEXT, NEW, NOTE, Settings
    from ..bench.plan import BenchPlan, draw, run_plan
    from ..bench.report import print_report
    from ..generate.by_name import found_for_targets

    lists = {CONTEXT: context_lengths, BATCH: batch_sizes, NEW: new_tokens}
    points = {axis: numbers(text, f"--{axis.replace('_', '-')}", "1,2,4") for axis, text in lists.items() if text}
    settings = Settings(max_new_tokens, temperature, seed, top_k)
    given, variants = drafter or [""], variants or ("default" if cold else "default,chain,lookup")
    try:
        if len(set(given)) < len(given):
            raise ValueError(f"a drafter is named twice: {', '.join(given)}")
        plan = BenchPlan(prompts or [], variants, settings, limit, repeats, points, profile, json_out, pictures)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not prompts:
        say(NOTE)
    if cold:
        _bench_cold(plan, target, drafter, dtype, device)
        return
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
    draw(plan, lambda *place: load("drawing", "bench").draw_bench(result, *place), console)


def _bench_cold(plan: Any, target: str | None, drafters: list[str] | None, dtype: Dtype, device: str) -> None:
    from ..bench.calls import BATCH
    from ..bench.plan import draw
    from ..bench.report import define

    if len(drafters or []) > 1 or plan.profile or plan.points.keys() - {BATCH}:
        raise typer.BadParameter("--cold takes one --drafter, and no --profile, --context-lengths or --new-tokens")
    cold = load("measuring", "cold")
    pair = cold.Pair(target, drafter_of(target, drafters[0] if drafters else None), dtype.torch, device)
    found = cold.run_cold(plan, pair, say)
    for each in found:
        console.print(each.table())
    define(console, cold.DEFINITIONS)
    draw(plan, partial(cold.draw_cold, found), console)


@app.command(short_help="Time batches with and without the drafter.")
def throughput(
    prompts: Annotated[list[Path], option("JSONL with `turns`.", "--prompts", exists=True, dir_okay=False)],
    target: shared.TargetOption = None,
    drafter: shared.DrafterOption = None,
    batch_sizes: Annotated[str, option("Batch sizes, comma-separated.")] = "1,2,4,8,16",
    calls: Annotated[int, option("Batches to time per size.", min=1)] = 4,
    max_new_tokens: shared.NewTokensOption = 64,
    tree_size: Annotated[int | None, option("Tree nodes per round and row; default: the drafter's.", min=1)] = None,
    num_assistant_tokens: Annotated[int | None, option("Draft depth; default: the drafter's.", min=1)] = None,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
) -> None:
    """Times batches of prompts with and without the drafter, sides alternating in one process."""
    from ..bench.calls import BATCH, Settings, SweepPoint, check_points, read_questions, sweep
    from ..bench.report import define, sweep_glossary, sweep_table
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


@app.command(short_help="Check a drafter for faults.")
def check(
    drafter: shared.DrafterArgument,
    target: shared.TargetArgument = None,
    prompts: shared.PromptFileOption = None,
    limit: Annotated[int, option("Maximum number of prompts.", min=1)] = 8,
    max_new_tokens: Annotated[int, option("Maximum number of new tokens per prompt.", min=2)] = 64,
    tolerance: Annotated[float, option("Largest mean total variation allowed; 0 chooses by dtype.", min=0.0)] = 0.0,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
) -> None:
    """Checks what a drafter drafts for a few prompts; exits with 1 if it is faulty.

    For a drafter that cannot be trained here, it compares texts with plain decoding and prints tau. For a trainable
    drafter, it compares the distributions of training and decoding at each depth. The last line is the
    verdict: passed, undecided (rounding in half precision) or FAILED.
    """
    from ..generate.by_name import found_for_targets
    from ..runtime.prompt_inputs import encode_prompts
    from ..training.families.trainable import as_trained

    texts = prompt_texts(prompts)
    named = found_for_targets(drafter, dtype.torch, device)
    model, tokenizer = loaded_target(target, dtype.torch, device)
    loaded = named(model)
    check_fit(loaded, model, tokenizer)
    inputs = encode_prompts(model, tokenizer, texts[:limit])
    trained = as_trained(loaded)
    if trained is not None:
        _check_training(trained, model, inputs, max_new_tokens, tolerance)
    else:
        _check_decoding(loaded, model, inputs, max_new_tokens)


def _check_training(drafter: Any, target: Any, inputs: list[Any], max_new_tokens: int, tolerance: float) -> None:
    from ..training.evaluate.parity import parity

    with working("comparing what training and decoding predict"):
        report = parity(drafter, target, [each["input_ids"] for each in inputs], max_new_tokens, tolerance)
    for line in report.lines():
        say(line)
    if report.passed:
        count, depths = sum(each.predictions for each in report.depths), len(report.depths)
        _end("passed", f"training and decoding agree about {count} predictions at all {depths} depths")
    else:
        _end(_FAILED, report.explain())


def _check_decoding(drafter: Any, target: Any, inputs: list[Any], max_new_tokens: int) -> None:
    from ..core.statistics import DraftStatistics
    from ..runtime.misreading import first_divergence

    call = {"do_sample": False, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    calls, same = [], 0
    for each in inputs:
        plain = target.generate(**each, **call).sequences
        output = target.generate(**each, **call, assistant_model=drafter)
        divergence = first_divergence(target, each["input_ids"].shape[1], plain, output.sequences)
        calls.append(output.statistics)
        same += divergence is None
        told = "yes" if divergence is None else divergence
        say(f"{calls[-1].new_tokens} tokens, tau {calls[-1].tau:.2f}, same text {told}")
    told = f"{same} of {len(calls)} texts are those of plain decoding; tau {DraftStatistics.sum(calls).tau:.2f}"
    if same == len(calls):
        _end("passed", told)
    elif target.dtype.itemsize < 4:
        _end("undecided", f"{told}; half precision rounds differently: check with --dtype float32")
    else:
        _end(_FAILED, told)


def _end(verdict: str, why: str) -> None:
    """Prints the last line, and exits with 1 if the drafter is faulty."""
    say(f"verdict: {verdict}: {why}")
    if verdict == _FAILED:
        sys.exit(1)
