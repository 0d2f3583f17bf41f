"""`hsdraft bench`, `throughput`, `first-calls` and `concurrent`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._shared import (
    DeviceOption,
    DrafterOption,
    Dtype,
    DtypeOption,
    TargetOption,
    check_fit,
    console,
    drafter_of,
    load_pair,
)

app = typer.Typer()


@app.command(short_help="Compare plain decoding, drafting and other systems.")
def bench(
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL with `turns`; default: 6 of its own."),
    ] = None,
    target: TargetOption = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Hub name or folder; repeat to compare several.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts in all, taken evenly from all categories.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated: default, untrained, chain, chain3 (depth), tree, tree8x3 (nodes, depth), any "
            "+ensemble, +resample, +ngrams, +cost or +option=value; chains (of 1 to 7 tokens); lookup, static, packed, "
            "cacheback, draft-model=FOLDER, mtp, dflash=FOLDER, economize-lookup, economize-eagle3=FOLDER, "
            "economize-hybrid=FOLDER."
        ),
    ] = "default,chain,lookup",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling: set before each call, one further each prompt.")] = 0,
    top_k: Annotated[
        int | None, typer.Option(help="For sampling: tokens drawn from, 0 for all; default: the target's own, or 50.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often all prompts are decoded by every system.")] = 1,
    context_lengths: Annotated[
        str | None, typer.Option(help="Also with prompts padded to so many tokens, as 256,1024,4096.")
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Also in batches, as 2,4,8,16,32.")] = None,
    new_tokens: Annotated[
        str | None, typer.Option(help="Also with calls that emit only so many tokens, as 1,4,8,16,32,64,128.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also time the parts of a round.")] = False,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here as JSON.")] = None,
    pictures: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the pictures; default: beside the JSON.")
    ] = None,
    economize: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Short for economize-eagle3=FOLDER and economize-eagle3=FOLDER:6:0.4."
        ),
    ] = None,
) -> None:
    """Compares plain decoding, drafting and other systems over a prompt file, in changing order in one process."""
    from ..bench.default_prompts import NOTE
    from ..bench.plan import BenchPlan, draw, run_plan, whole_numbers
    from ..bench.report import print_report
    from ..generate.by_name import load_drafter
    from ..runtime.target_loading import load_target

    names = (
        variants if economize is None else f"{variants},economize-eagle3={economize},economize-eagle3={economize}:6:0.4"
    )
    given = drafter or [""]
    try:
        if len(set(given)) < len(given):
            raise ValueError(f"a drafter is named twice: {', '.join(given)}")
        plan = BenchPlan(
            prompts or [],
            names,
            limit,
            max_new_tokens,
            temperature,
            seed,
            repeats,
            whole_numbers(context_lengths, "--context-lengths"),
            whole_numbers(batch_sizes, "--batch-sizes"),
            profile,
            json_out,
            pictures,
            whole_numbers(new_tokens, "--new-tokens"),
            top_k,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not prompts:
        console.print(NOTE, highlight=False, soft_wrap=True)
    loaded: dict[str, Any] = {}
    if plan.takes_drafter:
        model, tokenizer, loaded[given[0]] = load_pair(target, drafter[0] if drafter else None, dtype, device)
        for name in given[1:]:
            loaded[name] = load_drafter(name, dtype.torch, device)
            check_fit(loaded[name], model, tokenizer)
    else:
        model, tokenizer = load_target(target, dtype.torch, device)
    result = run_plan(plan, model, tokenizer, loaded, console)
    print_report(result, console)
    draw(plan, result, console)


@app.command(short_help="Time batches with and without the drafter.")
def throughput(
    prompts: Annotated[list[Path], typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL, `turns`.")],
    target: TargetOption = None,
    drafter: DrafterOption = None,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8,16",
    calls: Annotated[int, typer.Option(min=1, help="Batches timed for each size.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    tree_size: Annotated[int | None, typer.Option(min=1, help="Nodes a round and row; default: the drafter's.")] = None,
    num_assistant_tokens: Annotated[int | None, typer.Option(min=1, help="Depth; default: the drafter's.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Times batches of prompts with and without the drafter, sides alternating in one process."""
    from ..bench.run import spread
    from ..bench.throughput import print_throughput, run_throughput
    from ..training.data.conversations import read_prompts

    questions = spread([prompt for path in prompts for prompt in read_prompts(path)], None)
    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    for name, value in (("tree_size", tree_size), ("num_assistant_tokens", num_assistant_tokens)):
        if value is not None:
            setattr(loaded.generation_config, name, value)
    sizes = [int(size) for size in batch_sizes.split(",")]
    texts = [question.turns[0] for question in questions]
    print_throughput(run_throughput(model, tokenizer, loaded, texts, sizes, max_new_tokens, calls), console)


@app.command("first-calls", short_help="Time the first call of a process.")
def first_calls(
    lengths: Annotated[str, typer.Option(help="New tokens of the calls, comma-separated.")] = "8,32,128",
    repeats: Annotated[int, typer.Option(min=1, help="Processes for each length, plain and drafted.")] = 3,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = (
        "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell altogether?"
    ),
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Times the first call of a process, plain and with the drafter, each in a fresh process."""
    from ..bench.plan import whole_numbers
    from ..bench.processes import Pair, print_first_calls, run_first_calls

    try:
        counts = whole_numbers(lengths, "--lengths")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    pair = Pair(target, drafter_of(target, drafter), dtype.torch, device)
    print_first_calls(run_first_calls(pair, prompt, counts, repeats), console)


@app.command(short_help="Measure the memory of several calls at once.")
def concurrent(
    calls: Annotated[str, typer.Option(help="Calls at once, comma-separated.")] = "1,2,4,8",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL, `turns`; default: a few.")
    ] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    packed_weights: Annotated[
        bool | None, typer.Option(help="Pack in the first round, or never; default: as the drafter says.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Measures the memory of concurrent calls, each number of calls in a fresh process."""
    from ..bench.processes import Pair, print_concurrent, run_concurrent
    from ..training.data.conversations import read_prompts
    from ..training.evaluate.parity import PROMPTS

    try:
        counts = [int(count) for count in calls.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, found {calls!r}", param_hint="--calls") from None
    texts = list(PROMPTS) if prompts is None else [prompt.turns[0] for prompt in read_prompts(prompts)]
    pair = Pair(target, drafter_of(target, drafter), dtype.torch, packed_weights=packed_weights)
    print_concurrent(run_concurrent(pair, texts, counts, max_new_tokens), console)
