"""`hsdraft`: demo, bench and train from the command line."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from transformers.utils.logging import disable_progress_bar

from ._version import __version__
from .hub import commands

app = typer.Typer(
    help="Hidden-state speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()
if not console.is_terminal:
    console = Console(width=140)  # tables in a log file keep their columns


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)


class Injector(str, Enum):
    path = "path"
    low_rank = "low_rank"


class Head(str, Enum):
    target = "target"
    trained = "trained"


TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct."),
]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Hub name or folder; default: the one that comes with the target.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of target and drafter.")]
DeviceOption = Annotated[str, typer.Option(help="Device to run on.")]


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = (
        "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell altogether?"
    ),
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Answers a prompt with and without the drafter, drafted tokens coloured."""
    from .bench.demo import run_demo

    model, tokenizer, loaded = _load(target, drafter, dtype, device)
    run_demo(model, tokenizer, loaded, prompt, max_new_tokens, console)


@app.command()
def bench(
    prompts: Annotated[list[Path], typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL, `turns`.")],
    target: TargetOption = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Hub name or folder; repeat to compare several.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts in all, taken evenly from all categories.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated: default, untrained, chain, tree, tree8x3 (nodes, depth), any +ensemble, +resample, "
            "+ngrams, +cost or +option=value; lookup, static, packed, cacheback, economize-lookup, "
            "economize-eagle3=FOLDER, economize-hybrid=FOLDER."
        ),
    ] = "default,chain,lookup",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling: set before each call, one further each prompt.")] = 0,
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
    from .bench.plan import BenchPlan, draw, run_plan, whole_numbers
    from .bench.report import print_report
    from .drafters.hidden_state.modeling_hsdraft import HSDrafter
    from .target.target_loading import load_target

    names = (
        variants if economize is None else f"{variants},economize-eagle3={economize},economize-eagle3={economize}:6:0.4"
    )
    given = drafter or [""]
    try:
        if len(set(given)) < len(given):
            raise ValueError(f"a drafter is named twice: {', '.join(given)}")
        plan = BenchPlan(
            prompts,
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
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    loaded: dict[str, Any] = {}
    if plan.takes_drafter:
        model, tokenizer, loaded[given[0]] = _load(target, drafter[0] if drafter else None, dtype, device)
        for name in given[1:]:
            loaded[name] = HSDrafter.from_pretrained(name, dtype=dtype.torch).to(device).eval()
    else:
        model, tokenizer = load_target(target, dtype.torch, device)
    result = run_plan(plan, model, tokenizer, loaded, console)
    print_report(result, console)
    draw(plan, result, console)


@app.command()
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
    from .bench.run import spread
    from .bench.throughput import print_throughput, run_throughput
    from .training.conversations import read_prompts

    questions = spread([prompt for path in prompts for prompt in read_prompts(path)], None)
    model, tokenizer, loaded = _load(target, drafter, dtype, device)
    for name, value in (("tree_size", tree_size), ("num_assistant_tokens", num_assistant_tokens)):
        if value is not None:
            setattr(loaded.generation_config, name, value)
    sizes = [int(size) for size in batch_sizes.split(",")]
    texts = [question.turns[0] for question in questions]
    print_throughput(run_throughput(model, tokenizer, loaded, texts, sizes, max_new_tokens, calls), console)


@app.command("first-calls")
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
    """Times the first call of a process, plain and with the drafter, each in a process of its own."""
    from .bench.first_calls import print_first_calls, run_first_calls
    from .bench.plan import whole_numbers

    try:
        counts = whole_numbers(lengths, "--lengths")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    name = _drafter_of(target, drafter)
    print_first_calls(run_first_calls(target, name, dtype.torch, device, prompt, counts, repeats), console)


@app.command()
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
    """Measures the memory that calls take which run at once, each number of calls in a process of its own."""
    from .bench.concurrent import print_concurrent, run_concurrent
    from .training.conversations import read_prompts
    from .training.parity import PROMPTS

    try:
        counts = [int(count) for count in calls.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, found {calls!r}", param_hint="--calls") from None
    texts = list(PROMPTS) if prompts is None else [prompt.turns[0] for prompt in read_prompts(prompts)]
    name = _drafter_of(target, drafter)
    results = run_concurrent(target, name, dtype.torch, texts, counts, max_new_tokens, packed_weights)
    print_concurrent(results, console)


@app.command()
def support(
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "causal,seq2seq,image-text,speech",
    only: Annotated[str, typer.Option(help="Model types, comma-separated; default: all.")] = "",
) -> None:
    """Decodes a tiny random model of every type of transformers with and without drafts, and writes the table."""
    from .bench.support import MAPPINGS, as_markdown, check_all, write_table

    names = [task.strip() for task in tasks.split(",")]
    if not set(names) <= set(MAPPINGS):
        raise typer.BadParameter(f"expected some of {', '.join(MAPPINGS)}", param_hint="--tasks")
    rows = []
    for row in check_all(names, [name for name in only.split(",") if name]):
        rows.append(row)
        console.print(f"{row.task} {row.model_type}: {row.drafts} {row.reason}", highlight=False, soft_wrap=True)
    if out is not None:
        write_table(str(out), rows)
    summary = as_markdown(rows) if out is None else f"{len(rows)} types, table written to {out}"
    console.print(summary, highlight=False, soft_wrap=True, markup=False)
    if any(row.differs or row.drafts == "error" for row in rows):
        sys.exit(1)


@app.command()
def exactness(
    samples: Annotated[int, typer.Option(min=1000, help="Rounds drawn for each setting.")] = 200_000,
    processors: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    part: Annotated[str, typer.Option(help="i/n: the i-th of n shares of the settings, to run side by side.")] = "1/1",
) -> None:
    """Tests that every builder and verifier emits the target's own distribution; exits with 1 if not."""
    from .bench.exactness import PROCESSORS, check, settings

    chosen = tuple(name for name in processors.split(",") if name) or tuple(PROCESSORS)
    if not set(chosen) <= set(PROCESSORS):
        raise typer.BadParameter(f"expected some of {', '.join(PROCESSORS)}", param_hint="--processors")
    index, _, count = part.partition("/")
    mine = list(settings(chosen))[int(index) - 1 :: int(count)]
    worst = 1.0
    for setting in mine:
        outcome = check(*setting, samples=samples)
        worst = min(worst, outcome.p_value)
        verifier, builder, processor, temperature = setting
        console.print(
            f"{verifier:9} {builder:15} {processor:10} T={temperature}: p = {outcome.p_value:.4f}, "
            f"{outcome.accepted:.3f} drafts accepted a round",
            highlight=False,
            soft_wrap=True,
        )
    limit = 1e-3 / len(mine)  # one run in a thousand fails by chance
    verdict = "exact as far as this can tell" if worst >= limit else "NOT the target's distribution"
    summary = f"{len(mine)} settings of {samples} samples, least p-value {worst:.5f} (limit {limit:.5f}): {verdict}"
    console.print(summary, highlight=False, soft_wrap=True)
    if worst < limit:
        sys.exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any field of transformers.TrainingArguments is an option too (--max-steps, --learning-rate, --bf16, "
    "--num-train-epochs, "
    "--eval-steps, --report-to, --push-to-hub, --gradient-accumulation-steps, ...), as are --objective, --data-policy, "
    "--max-minutes, "
    "--depth-decay, --depth-weights, --regression-weight, --regression-steps, --chains-per-conversation, "
    "--rolled-fraction, --eval-new-tokens and --early-stopping-patience. Run the same command again to resume.",
)
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the run; run again to resume.")],
    target: TargetOption = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL: `turns` to answer, or `messages`; repeat."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Prompts from a data set of the Hub or a folder.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Its configuration.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Its split.")] = "train",
    dataset_column: Annotated[str | None, typer.Option(help="Text, turns or chat messages; default: found.")] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts at most; without files and data set, prompts the target invents (2000)."),
    ] = None,
    opening: Annotated[
        list[str] | None, typer.Option(help="How invented prompts begin, for a domain; repeat, taken in turn.")
    ] = None,
    invented_turns: Annotated[int, typer.Option(min=0, help="Further user turns the target makes up.")] = 0,
    answers_from: Annotated[str | None, typer.Option(help="OpenAI-compatible server that runs the target.")] = None,
    server_model: Annotated[str | None, typer.Option(help="The target's name there.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="Of answers, drawn from evenly; repeat. Default: 0 0 0.7 1.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a conversation.")] = 1024,
    answer_batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at a time.")] = 64,
    greedy_only: Annotated[bool, typer.Option(help="Learn from greedy answers only.")] = False,
    skip_bad_lines: Annotated[bool, typer.Option(help="Report unusable lines of --prompts and go on.")] = False,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Template file, for a target without one.")
    ] = None,
    cache_taps: Annotated[
        bool, typer.Option(help="Keep the target's hidden states on disk; faster from the second epoch on.")
    ] = False,
    eval_conversations: Annotated[int, typer.Option(min=1, help="Conversations held out.")] = 48,
    eval_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts that measure tau.")] = 16,
    taps: Annotated[str | None, typer.Option(help="Tapped layers, as 3,16,28; default: low, middle, high.")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(min=1, help="Default: a quarter of the vocabulary.")] = None,
    num_draft_steps: Annotated[
        int | None, typer.Option(min=1, help="K, hidden states rolled out per round; default 6.")
    ] = None,
    tree_size: Annotated[
        int | None, typer.Option(min=1, help="Nodes per round, at least K; default 24. Decides no weights.")
    ] = None,
    num_hidden_layers: Annotated[int | None, typer.Option(min=1, help="Layers of the trunk; default 1.")] = None,
    injector: Annotated[Injector | None, typer.Option(help="Default: path.")] = None,
    head: Annotated[Head | None, typer.Option(help="The target's output rows (default), or trained ones.")] = None,
    init_from: Annotated[str | None, typer.Option(help="Drafter to start from.")] = None,
    lora: Annotated[
        int | None, typer.Option(min=1, help="Train LoRA updates of this rank on --init-from instead of all weights.")
    ] = None,
    target_name: Annotated[str | None, typer.Option(help="Name of the target to store; default: --target.")] = None,
    publish_data: Annotated[
        str | None, typer.Option(help="Send the chats that the target answers to this data set of the Hub: user/name.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of the target; the drafter is trained in float32.")
    ] = Dtype.float32,
    device: Annotated[
        str | None, typer.Option(help="Default: this process's GPU, or the CPU; auto spreads the target over all.")
    ] = None,
) -> None:
    """Trains a drafter on the target's own answers; keeps the best one by measured tau."""
    from .target.target_loading import DEFAULT_TARGET, load_target
    from .training.arguments import parse_arguments
    from .training.plan import TrainingPlan
    from .training.run import train as run

    if lora is not None and init_from is None:
        raise typer.BadParameter("LoRA adapts a finished drafter; name it with --init-from", param_hint="--lora")
    arguments = parse_arguments(context.args)
    sizes = {
        "target_tap_layers": None if taps is None else _layers(taps),
        "num_draft_steps": num_draft_steps,
        "tree_size": tree_size,
        "num_hidden_layers": num_hidden_layers,
        "draft_vocab_size": draft_vocab_size,
        "injector": injector and injector.value,
        "head": head and head.value,
    }
    overrides: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    overrides["target_name"] = target_name or target or DEFAULT_TARGET
    plan = TrainingPlan(
        out=str(out),
        prompts=[str(path) for path in prompts or ()],
        dataset=dataset,
        dataset_config=dataset_config,
        dataset_split=dataset_split,
        dataset_column=dataset_column,
        num_prompts=num_prompts,
        openings=opening or [""],
        invented_turns=invented_turns,
        answers_from=answers_from,
        server_model=server_model,
        **({} if not temperature else {"temperatures": temperature}),
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        greedy_only=greedy_only,
        answer_batch_size=answer_batch_size,
        skip_bad_lines=skip_bad_lines,
        cache_taps=cache_taps,
        eval_conversations=eval_conversations,
        eval_prompts=eval_prompts,
        init_from=init_from,
        lora=lora,
        publish_data=publish_data,
        drafter=overrides,
    )
    model, tokenizer = load_target(target, dtype.torch, device or _own_device())
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    try:
        run(model, tokenizer, plan, arguments, report=console.print)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from what is in {out}")
        sys.exit(130)
    if os.environ.get("RANK", "0") == "0":
        console.print(f"drafter saved in {out}")


@app.command()
def average(
    drafters: Annotated[list[str], typer.Argument(help="Folders or Hub names, of drafters with one beginning.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    shares: Annotated[str, typer.Option(help="Of each, as 0.35,0.65; default: equal ones.")] = "",
    target: TargetOption = None,
    target_name: Annotated[str | None, typer.Option(help="Name of the target to store; default: as before.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Averages the weights of drafters that began as one, which often draft best so; the rest is the first's."""
    from .target.target_loading import load_target
    from .training.average import average_folders, check_shares

    try:
        parts = [float(share) for share in shares.split(",")] if shares else [1.0] * len(drafters)
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 0.35,0.65, found {shares!r}") from None
    check_shares(len(drafters), parts)
    model, tokenizer = load_target(target, dtype.torch, device)
    average_folders(drafters, parts, out, model, tokenizer, target_name)
    console.print(f"drafter saved in {out}", highlight=False, soft_wrap=True)


@app.command()
def check(
    drafter: Annotated[str, typer.Argument(help="Hub name or folder of the drafter.")],
    target: Annotated[
        str | None, typer.Argument(help="Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL, `turns`; default: a few.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts in all.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Mean total variation allowed; 0: by dtype.")] = 0.0,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Checks that training computes what decoding uses, depth by depth; exits with 1 if not."""
    from .bench.measure import encode_prompt
    from .drafters.hidden_state.modeling_hsdraft import HSDrafter
    from .target.target_loading import load_target
    from .training.conversations import read_prompts
    from .training.parity import PROMPTS, ParityError, parity

    texts = list(PROMPTS) if prompts is None else [prompt.turns[0] for prompt in read_prompts(prompts)]
    loaded = HSDrafter.from_pretrained(drafter, dtype=dtype.torch).to(device).eval()
    model, tokenizer = load_target(target, dtype.torch, device)
    inputs = [encode_prompt(tokenizer, text, device)["input_ids"] for text in texts[:limit]]
    report = parity(loaded, model, inputs, max_new_tokens, tolerance)
    for line in report.lines():
        console.print(line, highlight=False, soft_wrap=True)
    if not report.passed:
        raise ParityError(report.explain())


@app.command()
def estimate(
    target: Annotated[str, typer.Argument(help="Hub name or folder of the target, or a config.json.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the training conversations.")] = 1_000_000,
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over them.")] = 3.0,
    flops_per_second: Annotated[float | None, typer.Option(min=1.0, help="Of the machine, as reached.")] = None,
    chains_per_token: Annotated[float, typer.Option(min=0.0, max=1.0, help="Chain starts per token.")] = 0.5,
    rolled_fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share followed to depth K.")] = 0.5,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens packed into a step.")] = 1024,
    cache_taps: Annotated[bool, typer.Option(help="With the target's hidden states on disk.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    sharded: Annotated[bool, typer.Option(help="Target sharded over the devices (FSDP, ZeRO 3).")] = False,
    num_draft_steps: Annotated[int, typer.Option(min=1, help="K.")] = 6,
) -> None:
    """Says what training a drafter for a target would take, with the arithmetic; runs nothing."""
    from transformers import AutoConfig

    from .drafters.hidden_state.configuration_hsdraft import HSDraftConfig
    from .training.estimate import estimate as run
    from .training.estimate import explain

    config = AutoConfig.from_pretrained(target)
    figures = run(
        config,
        HSDraftConfig.for_target_config(config, num_draft_steps=num_draft_steps),
        tokens=tokens,
        epochs=epochs,
        flops_per_second=flops_per_second,
        chains_per_token=chains_per_token,
        rolled_fraction=rolled_fraction,
        conversations_tokens_per_step=tokens_per_step,
        cached=cache_taps,
        world_size=world_size,
        sharded=sharded,
    )
    for line in explain(figures):
        console.print(line, highlight=False, soft_wrap=True)


app.command()(commands.push)
app.command()(commands.pull)
app.command()(commands.info)
app.command("list")(commands.list_cached)
app.command()(commands.card)


def _own_device() -> str:
    """The GPU that `accelerate launch` gave this process, the first one without it, or the CPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected layer numbers such as 3,16,28, found {text!r}") from None


def _drafter_of(target: str | None, drafter: str | None) -> str:
    """The drafter that was named, or the one that comes with the target."""
    from .target.target_loading import default_drafter

    name = drafter or default_drafter(target)
    if name is None:
        raise typer.BadParameter(
            "no drafter comes with this target; train one with `hsdraft train`", param_hint="--drafter"
        )
    return name


def _load(target: str | None, drafter: str | None, dtype: Dtype, device: str) -> tuple[Any, Any, Any]:
    from .drafters.hidden_state.modeling_hsdraft import HSDrafter
    from .target.target_loading import load_target

    name = _drafter_of(target, drafter)
    loaded = HSDrafter.from_pretrained(name, dtype=dtype.torch).to(device).eval()
    model, tokenizer = load_target(target, dtype.torch, device)
    return model, tokenizer, loaded


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Hidden-state speculative decoding for transformers."""
    disable_progress_bar()  # of loading; the commands show progress of their own
    if version:
        console.print(__version__, highlight=False)


def main() -> None:
    """The command; what a user got wrong is said in a line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
