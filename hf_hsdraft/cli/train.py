"""`hsdraft train`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ._shared import Dtype, console, need_extra
from ._train_help import TrainCommand, with_options

if TYPE_CHECKING:
    from ..training.data.plan import TrainingPlan

app = typer.Typer()
# Options that are fields of the drafter's configuration, and one of another name there
_OF_DRAFTER = (
    "num_draft_steps", "tree_size", "num_hidden_layers", "num_roll_layers", "num_step_modules", "draft_vocab_size",
    "injector", "head", "markov_rank", "markov_head",
)  # fmt: skip
_RENAMED = {"markov_head": "markov_head_type"}
# A run of five minutes, loading and leaving included: a drafter to look at, not to keep. Short greedy answers to
# prompts for which the target writes no texts first, and a small draft vocabulary: few answers would choose more.
_QUICK_PLAN: dict[str, Any] = {
    "temperatures": (0.0,), "max_new_tokens": 96, "max_length": 256, "cache_taps": True, "answer_batch_size": 32,
    "eval_conversations": 16, "eval_prompts": 8,
}  # fmt: skip
_QUICK_KINDS = dict.fromkeys(("question", "writing", "code", "mathematics"), 1.0)
_QUICK_ARGUMENTS: dict[str, Any] = {
    "max_minutes": 4.75, "learning_rate": 1e-3, "eval_steps": 10**6, "eval_new_tokens": 32, "logging_steps": 10,
}  # fmt: skip
_QUICK_VOCABULARY = 8192


@app.command(
    cls=TrainCommand,
    short_help="Train a drafter on the target's own answers.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other field of transformers.TrainingArguments is an option too. The same command resumes a run.",
)
@with_options
def train(context: typer.Context, **options: Any) -> None:
    """Trains a drafter on the target's own answers; keeps the best one by measured tau."""
    began = context.meta.get("began", time.monotonic())
    also = ["openai"] * (options["answers_from"] is not None) + ["peft"] * (options["lora"] is not None)
    need_extra("train", "train", ["accelerate", "datasets", "matplotlib", "pyarrow", *also])
    from dataclasses import fields

    from ..runtime.target_loading import DEFAULT_TARGET, load_target
    from ..training.data.plan import TrainingPlan
    from ..training.loop.arguments import DRAFTER_OPTIONS, parse_arguments
    from ..training.loop.checks import prepared
    from ..training.loop.run_folder import check_no_other_run

    given = {name: value for name, value in options.items() if _is_given(context, name)}
    target, quick, place = given.get("target"), options["quick"], options["device"] or _own_device()
    if "lora" in given and "init_from" not in given:
        raise typer.BadParameter("LoRA adapts a finished drafter; name it with --init-from", param_hint="--lora")
    arguments = parse_arguments(context.args)
    drafter = {_RENAMED.get(name, name): value for name, value in given.items() if name in _OF_DRAFTER}
    drafter |= {"target_tap_layers": _layers(given["taps"])} if "taps" in given else {}
    drafter |= {name: arguments.pop(name) for name in DRAFTER_OPTIONS if name in arguments}
    drafter["target_name"] = given.get("target_name") or target or DEFAULT_TARGET
    as_given = {each.name: given[each.name] for each in fields(TrainingPlan) if each.name in given}
    as_given |= {"out": str(options["out"]), "drafter": drafter, "kinds": _shares(options["kinds"])}
    as_given |= {name: [str(path) for path in options[name] or ()] for name in ("prompts", "exclude_near")}
    as_given |= {"openings": options["opening"] or []}
    as_given |= {"temperatures": given["temperature"]} if given.get("temperature") else {}
    plan, arguments = quick_run(as_given, arguments) if quick else (TrainingPlan(**as_given), arguments)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and arguments.get("max_minutes"):  # before the target is loaded
        told = "it divides the time of one process: give --max-training-minutes, or start without `accelerate launch`"
        raise typer.BadParameter(told, param_hint="--quick" if quick else "--max-minutes")
    dtype = options["dtype"] or _fastest(place)
    if dtype is Dtype.bfloat16:
        arguments.setdefault("bf16", True)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:  # several processes start together, when they load the target
        prepared(plan, arguments, "cpu" if place.startswith("cpu") else "cuda")  # reports errors before that
        check_no_other_run(options["out"])
    _say(f"loading {target or DEFAULT_TARGET}")
    model, tokenizer = load_target(target, dtype.torch, place)
    if options["chat_template"] is not None:
        tokenizer.chat_template = options["chat_template"].read_text(encoding="utf-8")
    _run(model, tokenizer, plan, arguments, began, target, dtype, options["quick"])


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


def quick_run(given: dict[str, Any], arguments: dict[str, Any]) -> tuple[TrainingPlan, dict[str, Any]]:
    """Returns the plan and the arguments of a quick run; what is given of either is kept."""
    from ..training.data.plan import TrainingPlan
    from ..training.loop.run_folder import ended_untrained

    own = TrainingPlan(**given)
    fields, further = {**_QUICK_PLAN, **given}, {**_QUICK_ARGUMENTS, **arguments}
    if any(arguments.get(name) is not None for name in ("max_steps", "num_train_epochs", "max_training_minutes")):
        further.pop("max_minutes")
    elif "max_minutes" not in arguments:  # a run that ended with an untrained drafter goes on for as long again
        further["max_minutes"] += ended_untrained(Path(own.out)).get("limits", {}).get("max_minutes", 0.0)
    if own.invents and not own.openings:
        fields["kinds"] = given.get("kinds") or _QUICK_KINDS
    if own.family == "hidden-state" and own.init_from is None:
        fields["drafter"] = {"draft_vocab_size": _QUICK_VOCABULARY, **own.drafter}
    return TrainingPlan(**fields), further


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
