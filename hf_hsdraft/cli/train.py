"""`hsdraft train`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from ..core.methods import offered
from ._shared import Dtype, Injector, TargetOption, checked_device, console, need_extra
from ._train_help import TrainCommand

if TYPE_CHECKING:
    from ..training.data.plan import TrainingPlan

app = typer.Typer()
_FAMILIES = ("hidden-state", "block", "eagle3", "lm", *offered("family"))
Family: Any = cast(Any, StrEnum)("Family", {name: name for name in _FAMILIES})
_DEFAULT_FAMILY = Family("hidden-state")


@app.command(
    cls=TrainCommand,
    short_help="Train a drafter on the target's own answers.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other field of transformers.TrainingArguments is an option too. The same command resumes a run.",
)
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the run; run again to resume.")],
    target: TargetOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Five minutes for a first look; other options change its settings.")
    ] = False,
    family: Annotated[Family, typer.Option(help="Family of the drafter.")] = _DEFAULT_FAMILY,
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
        typer.Option(
            min=1,
            help="Prompts at most. Without files and data set, prompts the target invents: 2000, or as many as "
            "--max-minutes or --stream has time for.",
        ),
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="Of invented prompts, with shares, as code,summary=2; default: all kinds evenly.")
    ] = "",
    opening: Annotated[
        list[str] | None, typer.Option(help="How invented prompts begin, for a domain, instead of kinds; repeat.")
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
    exclude_near: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Prompts that will judge: leave near-duplicates out; repeat."),
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option(help="Report unusable lines of --prompts and leave them out.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Template file, for a target without one.")
    ] = None,
    cache_taps: Annotated[
        bool | None,
        typer.Option(
            help="Keep the target's hidden states on disk, so that no step computes them; default: where a target on a "
            "CPU gives all answers."
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option(help="Learn while the target still answers; each conversation --passes times.")
    ] = False,
    passes: Annotated[int, typer.Option(min=1, help="How often a stream learns from a conversation.")] = 3,
    eval_conversations: Annotated[int, typer.Option(min=1, help="Conversations held out.")] = 48,
    eval_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts that measure tau.")] = 16,
    taps: Annotated[str | None, typer.Option(help="Tapped layers, as 3,16,28; default: low, middle, high.")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(min=1, help="Default: what pays, by the answers.")] = None,
    num_draft_steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="K, depth of a draft; default 6, of block, specformer, steered-lm 8, eagle3 7, lm and self 5."
        ),
    ] = None,
    tree_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes per round, at least K; default 24, of self and both lm 16; decides no weights."
        ),
    ] = None,
    num_hidden_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers; default 1, of block drafters 3, of lm a fifth of the target's.")
    ] = None,
    num_roll_layers: Annotated[
        int | None, typer.Option(min=1, help="Of hidden-state drafters: layers of a roll-out step; default: all.")
    ] = None,
    num_step_modules: Annotated[
        int | None, typer.Option(min=1, help="Of hidden-state drafters: sets of parameters by step; default: 1.")
    ] = None,
    injector: Annotated[Injector | None, typer.Option(help="Of hidden-state drafters; default: path.")] = None,
    head: Annotated[
        Literal["target", "trained"] | None,
        typer.Option(help="Of hidden-state and specformer drafters; default: target."),
    ] = None,
    markov_rank: Annotated[
        int | None, typer.Option(min=0, help="Of block drafters' bias by the token before; default 256, 0 for none.")
    ] = None,
    markov_head: Annotated[
        Literal["vanilla", "gated", "rnn"] | None, typer.Option(help="Formula of that bias; default: vanilla.")
    ] = None,
    init_from: Annotated[str | None, typer.Option(help="Drafter to start from.")] = None,
    lora: Annotated[
        int | None, typer.Option(min=1, help="Train LoRA updates of this rank on --init-from instead of all weights.")
    ] = None,
    adapter_name: Annotated[
        str | None, typer.Option(help="Name of that LoRA adapter, saved in a folder of this name; default: none.")
    ] = None,
    target_name: Annotated[str | None, typer.Option(help="Name of the target to store; default: --target.")] = None,
    publish_data: Annotated[
        str | None, typer.Option(help="Send the chats that the target answers to this data set of the Hub: user/name.")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Dtype of the target; default: bfloat16 where the device computes in it, else float32. In bfloat16 "
            "training steps are too (--bf16 false: in float32); weights and updates are in float32."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Default: this process's GPU, or the CPU; auto spreads the target over all.",
            callback=lambda device: device if device in (None, "auto") else checked_device(device),
        ),
    ] = None,
) -> None:
    """Trains a drafter on the target's own answers; keeps the best one by measured tau."""
    began = time.monotonic()
    also = ["openai"] * (answers_from is not None) + ["peft"] * (lora is not None)
    need_extra("train", "train", ["accelerate", "datasets", "matplotlib", "pyarrow", *also])
    from dataclasses import fields as fields_of

    from ..runtime.target_loading import DEFAULT_TARGET, load_target
    from ..training.data.plan import TrainingPlan
    from ..training.loop.arguments import DRAFTER_OPTIONS, parse_arguments
    from ..training.loop.checks import prepared
    from ..training.loop.quick import quick as quick_run
    from ..training.loop.run_folder import check_no_other_run

    if lora is not None and init_from is None:
        raise typer.BadParameter("LoRA adapts a finished drafter; name it with --init-from", param_hint="--lora")
    arguments = parse_arguments(context.args)
    sizes = {
        "target_tap_layers": None if taps is None else _layers(taps),
        "num_draft_steps": num_draft_steps,
        "tree_size": tree_size,
        "num_hidden_layers": num_hidden_layers,
        "num_roll_layers": num_roll_layers,
        "num_step_modules": num_step_modules,
        "draft_vocab_size": draft_vocab_size,
        "injector": injector and injector.value,
        "head": head,
        "markov_rank": markov_rank,
        "markov_head_type": markov_head,
    }
    overrides: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    overrides |= {name: arguments.pop(name) for name in DRAFTER_OPTIONS if name in arguments}
    overrides["target_name"] = target_name or target or DEFAULT_TARGET
    names = {each.name for each in fields_of(TrainingPlan)} & context.params.keys()
    as_given: dict[str, Any] = {name: context.params[name] for name in names if not quick or _is_given(context, name)}
    as_given |= {"temperatures": temperature} if temperature else {}
    as_given |= {"out": str(out), "family": family.value, "drafter": overrides, "openings": opening or []}
    as_given |= {"prompts": [str(path) for path in prompts or ()], "kinds": _shares(kinds)}
    as_given |= {"exclude_near": [str(path) for path in exclude_near or ()]}
    plan, arguments = quick_run(as_given, arguments) if quick else (TrainingPlan(**as_given), arguments)
    place = device or _own_device()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and arguments.get("max_minutes"):  # before the target is loaded
        told = "it divides the time of one process: give --max-training-minutes, or start without `accelerate launch`"
        raise typer.BadParameter(told, param_hint="--quick" if quick else "--max-minutes")
    dtype = dtype or _fastest(place)
    if dtype is Dtype.bfloat16:
        arguments.setdefault("bf16", True)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:  # several processes start together, when they load the target
        prepared(plan, arguments, "cpu" if place.startswith("cpu") else "cuda")  # reports errors before that
        check_no_other_run(out)
    _say(f"loading {target or DEFAULT_TARGET}")
    model, tokenizer = load_target(target, dtype.torch, place)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    _run(model, tokenizer, plan, arguments, began, target, dtype, quick)


def _run(
    model: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    arguments: dict[str, Any],
    began: float,
    target: str | None,
    dtype: Dtype,
    quick: bool,
) -> None:
    """Trains; says on Ctrl-C that the work so far is not lost."""
    from ..training.loop.progress import Reporter
    from ..training.loop.results import result_of, what_is_needed
    from ..training.loop.run import train as run

    try:
        run(model, tokenizer, plan, arguments, Reporter(_say, console=console if console.is_terminal else None), began)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command resumes from what is in {plan.out}")
        sys.exit(130)
    if os.environ.get("RANK", "0") == "0":
        if plan.lora is None:
            needed = what_is_needed(Path(plan.out), quick and "max_minutes" in arguments)
            options = ["--drafter", plan.out, *(["--target", target] if target else []), "--dtype", dtype.value]
            _say(needed or f"next: hsdraft bench {shlex.join(options)}")
        _say(result_of(plan.results))


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _fastest(device: str) -> Dtype:
    """The dtype in which a target decodes and a drafter learns fastest."""
    import torch

    from ..cpu.private_operators import can_pack

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = (device != "cpu" and device != "auto") or can_pack(torch.bfloat16)
    return Dtype.bfloat16 if fast else Dtype.float32


def _own_device() -> str:
    """The GPU that `accelerate launch` gave this process, the first one without it, or the CPU."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            raise typer.BadParameter(f"expected names and shares such as code,summary=2, found {text!r}") from None
    return shares


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected layer numbers such as 3,16,28, found {text!r}") from None
