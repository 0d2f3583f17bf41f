"""`hsdraft train`. Its options are declared in `training/data/plan.py`; those of this file choose where it runs."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import typer
from typer.core import TyperCommand

from ..core.checks import nearest_option
from ..core.methods import offered
from ..core.progress import Reporter
from ..training.data.plan import DATA, PANELS, RUNNING, DrafterFields, LearningOptions, Option, TrainingPlan, options_of
from ._shared import _TARGET, Dtype, checked_device, console, need_extra, present, say

app = typer.Typer()
# A run of five minutes, loading and leaving included: a drafter to look at, not to keep. Short greedy answers to
# prompts for which the target writes no texts first, and a small draft vocabulary: few answers would choose more.
_QUICK_PLAN: dict[str, Any] = {
    "temperatures": [0.0], "max_new_tokens": 96, "max_length": 256, "cache_taps": True, "answer_batch_size": 32,
    "eval_conversations": 16, "eval_prompts": 8,
}  # fmt: skip
_QUICK_KINDS = dict.fromkeys(("question", "writing", "code", "mathematics"), 1.0)
_QUICK_ARGUMENTS: dict[str, Any] = {
    "max_minutes": 4.75, "learning_rate": 1e-3, "eval_steps": 10**6, "eval_new_tokens": 32, "logging_steps": 10,
}  # fmt: skip
_QUICK_VOCABULARY = 8192


def _own_or(device: str | None) -> str | None:
    return device if device in (None, "auto") else checked_device(device)


@dataclass
class RunOptions:
    """Options that choose target and device."""

    panel: ClassVar[str] = RUNNING
    target: Annotated[str | None, _TARGET, {"callback": present}] = None
    quick: Annotated[
        bool, "Five minutes for a first look; other options change its settings.", {"names": ["--quick"]}
    ] = False
    dtype: Annotated[
        Dtype | None,
        "Dtype of the target; default: bfloat16 where the device computes in it, else float32. In bfloat16 training "
        "steps are too (--bf16 false: in float32); weights and updates are in float32.",
    ] = None
    device: Annotated[
        str | None,
        "Default: this process's GPU, or the CPU; auto spreads the target over all.",
        {"callback": _own_or},
    ] = None
    chat_template: Annotated[
        Path | None, "Template file, for a target without one.", DATA, {"exists": True, "dir_okay": False}
    ] = None


def _with_options(body: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, which takes a context and further keywords, the options that dataclasses declare."""
    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for kind in (RunOptions, TrainingPlan, DrafterFields):
        for name, own in options_of(kind).items():
            limits = {key: value for key, value in own.limits.items() if key != "names"}
            shown = typer.Option(*own.limits.get("names", []), help=own.sentence, rich_help_panel=own.panel, **limits)
            default = Parameter.empty if name == "out" else None if own.default is MISSING else own.default
            more = {"default": default, "annotation": Annotated[own.type, shown]}
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, **more))
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return body


class TrainCommand(TyperCommand):
    """Shows options in panels, those of the training arguments too. Refuses an option that is neither."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, further, _ = self.make_parser(ctx).parse_args(list(args))
        given = [each.partition("=")[0] for each in further if re.match(r"--?[^\W\d]", each)]
        fields = {_flag(name) for name in [*options_of(LearningOptions), *_of_methods(), *_of_transformers()]}
        for each in given:
            if each.replace("_", "-").replace("--no-", "--", 1) not in fields:
                known = [*fields, *(name for own in self.get_params(ctx) for name in own.opts)]
                near = nearest_option(each, known)
                ctx.fail(f"No such option: {each}" + (f". Did you mean {near}?" if near else ""))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for panel in PANELS:
            own = [each for each in self.get_params(ctx) if getattr(each, "rich_help_panel", None) in (panel, None)]
            shown = [each.get_help_record(ctx) for each in own if panel == RUNNING or each.name != "help"]
            shown += [_record(name, each) for name, each in options_of(LearningOptions).items() if each.panel == panel]
            with formatter.section(panel):
                formatter.write_dl([record for record in shown if record])
        if of_methods := _of_methods():
            with formatter.section("Of methods"):
                formatter.write_text(", ".join(_flag(name) for name in of_methods))


def _record(name: str, option: Option) -> tuple[str, str]:
    """The help of an option of the training arguments."""
    kind = next(iter(get_args(option.type)), option.type)  # of `int | None`, int
    default = "" if option.default is None or option.default is False else f"  [default: {option.default}]"
    named = _flag(name) if kind is bool else f"{_flag(name)} <{kind.__name__}>"
    return named, option.sentence + default


def _of_methods() -> list[str]:
    return [name for kind in ("training_option", "drafter_option") for name in offered(kind)]


def _of_transformers() -> list[str]:
    """The fields of `TrainingArguments`, by the source of transformers, which is not imported."""
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    code = ast.parse(Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    [own] = [node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    return [each.target.id for each in own.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@app.command(
    cls=TrainCommand,
    short_help="Train a drafter on the target's own answers.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other field of transformers.TrainingArguments is an option too. The same command resumes a run.",
)
@_with_options
def train(context: typer.Context, **options: Any) -> None:
    """Trains a drafter on the target's own answers; keeps the best one by measured tau."""
    began = context.meta.get("began", time.monotonic())
    also = ["openai"] * (options["answers_from"] is not None) + ["peft"] * (options["lora"] is not None)
    need_extra("train", "train", ["accelerate", "datasets", "matplotlib", "pyarrow", *also])
    from ..runtime.target_loading import DEFAULT_TARGET, load_target
    from ..training.loop.arguments import DRAFTER_OPTIONS, parse_arguments
    from ..training.loop.run_folder import check_no_other_run
    from ..training.loop.start import prepared

    run_on = {name: options.pop(name) for name in options_of(RunOptions)}
    target, quick, chat_template = (run_on[name] for name in ("target", "quick", "chat_template"))
    sources = {name: context.get_parameter_source(name) for name in options}
    on_line = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    given = {name: options[name] for name in on_line}
    place, named = run_on["device"] or _own_device(), target or DEFAULT_TARGET
    if "lora" in given and "init_from" not in given:
        raise typer.BadParameter("LoRA adapts a finished drafter; name it with --init-from", param_hint="--lora")
    arguments = parse_arguments(context.args)
    drafter = {"target_name": named} | {name: given.pop(name) for name in options_of(DrafterFields) if name in given}
    drafter |= {name: arguments.pop(name) for name in DRAFTER_OPTIONS if name in arguments}
    as_given = {**given, "drafter": drafter}
    plan, arguments = quick_run(as_given, arguments) if quick else (TrainingPlan(**as_given), arguments)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and arguments.get("max_minutes"):  # before the target is loaded
        told = "it divides the time of one process: give --max-training-minutes, or start without `accelerate launch`"
        raise typer.BadParameter(told, param_hint="--quick" if quick else "--max-minutes")
    dtype = run_on["dtype"] or _fastest(place)
    if dtype is Dtype.bfloat16:
        arguments.setdefault("bf16", True)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:  # several processes start together, when they load the target
        prepared(plan, arguments, "cpu" if place.startswith("cpu") else "cuda")  # reports errors before that
        check_no_other_run(Path(plan.out))
    _say(f"loading {named}")
    model, tokenizer = load_target(target, dtype.torch, place)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
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
            bench = ["--drafter", plan.out, *(["--target", target] if target else []), "--dtype", dtype.value]
            _say(needed or f"next: hsdraft bench {shlex.join(bench)}")
        _say(result_of(plan.results))


def quick_run(given: dict[str, Any], arguments: dict[str, Any]) -> tuple[TrainingPlan, dict[str, Any]]:
    """Returns the plan and the arguments of a quick run; what is given of either is kept."""
    from ..training.loop.run_folder import ended_untrained

    own = TrainingPlan(**given)
    fields, further = {**_QUICK_PLAN, **given}, {**_QUICK_ARGUMENTS, **arguments}
    if any(arguments.get(name) is not None for name in ("max_steps", "num_train_epochs", "max_training_minutes")):
        further.pop("max_minutes")
    elif "max_minutes" not in arguments:  # a run that ended with an untrained drafter continues for as long again
        further["max_minutes"] += ended_untrained(Path(own.out)).get("limits", {}).get("max_minutes", 0.0)
    if own.invents and not own.openings:
        fields["kinds"] = own.kinds or _QUICK_KINDS
    if own.family == "hidden-state" and own.init_from is None:
        fields["drafter"] = {"draft_vocab_size": _QUICK_VOCABULARY, **own.drafter}
    return TrainingPlan(**fields), further


def _say(line: str) -> None:
    say(line)
    console.file.flush()


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
