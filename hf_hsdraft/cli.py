"""`hsdraft`: demo, bench and train from the command line."""

from __future__ import annotations

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

app = typer.Typer(
    help="Hidden-state speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()


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
    tuned: Annotated[bool, typer.Option("--tune/--no-tune", help="First find the fastest draft shape here.")] = True,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Answers a prompt with and without the drafter, drafted tokens coloured."""
    from .bench.demo import run_demo

    model, tokenizer, loaded = _load(target, drafter, dtype, device)
    run_demo(model, tokenizer, loaded, prompt, max_new_tokens, console, tuned)


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
        typer.Option(help="Comma-separated: chain, tree, tree8x3 (nodes, depth), any +ensemble or +resample; lookup."),
    ] = "tree,chain,lookup",
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here as JSON.")] = None,
) -> None:
    """Compares plain decoding, drafting and prompt lookup over a prompt file, sides alternating in one process."""
    from .bench.table import Variant, print_table, run_bench
    from .modeling_hsdraft import HSDrafter
    from .training.conversations import read_prompts

    names = [name.strip() for name in variants.split(",") if name.strip()]
    try:
        for name in names:
            Variant.parse(name)
        if len(set(names)) < len(names):
            raise ValueError(f"a variant is named twice: {variants}")
        if json_out is not None and not json_out.parent.is_dir():
            raise ValueError(f"no such folder for --json: {json_out.parent}")
        questions = [prompt for path in prompts for prompt in read_prompts(path)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    model, tokenizer, first = _load(target, drafter[0] if drafter else None, dtype, device)
    others = [HSDrafter.from_pretrained(name, dtype=dtype.torch).to(device).eval() for name in (drafter or [])[1:]]
    chosen = []
    for name in names:
        for each in [first] if name == "lookup" else [first, *others]:
            chosen.append(Variant.parse(name, each.name_or_path if others else "", each))
    print_table(run_bench(model, tokenizer, chosen, questions, limit, max_new_tokens, console, json_out), console)


@app.command()
def train(
    prompts: Annotated[
        list[Path],
        typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL: `turns` to answer, or `messages`; repeat."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; run again to resume.")],
    target: TargetOption = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 2000,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak, after the warm-up.")] = 6e-4,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts answered at most.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a conversation.")] = 1024,
    greedy_only: Annotated[bool, typer.Option(help="Learn from greedy answers only.")] = False,
    conversations_per_step: Annotated[int, typer.Option(min=1, help="Conversations packed into a step.")] = 2,
    chains_per_step: Annotated[int, typer.Option(min=1, help="Chain starts sampled from them.")] = 160,
    rolled_fraction: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the chains followed beyond the first depth.")
    ] = 0.5,
    eval_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints, each with its tau.")] = 500,
    eval_conversations: Annotated[int, typer.Option(min=1, help="Conversations held out.")] = 48,
    eval_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts that measure tau.")] = 16,
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
    target_name: Annotated[str | None, typer.Option(help="Name of the target to store; default: --target.")] = None,
    bf16: Annotated[bool, typer.Option(help="Training steps in bfloat16 autocast, weights in float32.")] = False,
    seed: int = 0,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of the target; the drafter is trained in float32.")
    ] = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Trains a drafter on the target's own answers; keeps the best one by measured tau."""
    from .target_loading import DEFAULT_TARGET, load_target
    from .training.run import TrainingPlan
    from .training.run import train as run

    sizes = {
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
        prompts=[str(path) for path in prompts],
        out=str(out),
        max_steps=max_steps,
        learning_rate=learning_rate,
        conversations_per_step=conversations_per_step,
        chains_per_step=chains_per_step,
        rolled_fraction=rolled_fraction,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        max_prompts=max_prompts,
        greedy_only=greedy_only,
        eval_conversations=eval_conversations,
        eval_prompts=eval_prompts,
        eval_steps=eval_steps,
        init_from=init_from,
        bf16=bf16,
        seed=seed,
        drafter=overrides,
    )
    model, tokenizer = load_target(target, dtype.torch, device)
    run(model, tokenizer, plan, report=console.print)
    console.print(f"drafter saved in {out}")


def _load(target: str | None, drafter: str | None, dtype: Dtype, device: str) -> tuple[Any, Any, Any]:
    from .modeling_hsdraft import HSDrafter
    from .target_loading import default_drafter, load_target

    name = drafter or default_drafter(target)
    if name is None:
        raise typer.BadParameter(
            "no drafter comes with this target; train one with `hsdraft train`", param_hint="--drafter"
        )
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
    except (ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
