"""transformers' `TrainingArguments` with further fields for the drafter's loss, in code and on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from accelerate import PartialState
from accelerate.utils import patch_environment
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from ...core.methods import Registry
from ..data.plan import LearningOptions, check_limits
from ..loss.chains import DATA_POLICIES
from ..loss.loss import WEIGHTINGS, Term
from ..loss.objectives import OBJECTIVES, WHOLE_LOSSES, objective_of

_OBJECTIVES = (*OBJECTIVES, *WHOLE_LOSSES)
_DEPTH_WEIGHTINGS = ("fixed", "by-prediction", *WEIGHTINGS)
_MINUTES = ("max_minutes", "max_training_minutes")


@dataclass(frozen=True)
class TrainingOption:
    """A training argument of one method; `check` raises a ValueError if a value does not go with the other ones.

    `term` makes what a value that is not 0 does to the loss, if anything.
    """

    type: type
    check: Callable[[DrafterTrainingArguments, Any], None] = lambda args, value: None
    default: Any = None
    term: Callable[[DrafterTrainingArguments, Any], Term | None] = lambda args, value: None


TRAINING_OPTIONS: Registry[TrainingOption] = Registry("training_option")
DRAFTER_OPTIONS: Registry[type] = Registry("drafter_option")  # fields of a method's drafters, with their types


@dataclass
class DrafterTrainingArguments(LearningOptions, TrainingArguments):
    """transformers' `TrainingArguments` with `LearningOptions`, and defaults that suit them.

    With a limit of minutes `TimeBudget` sets the learning rate: `max_steps`, `warmup_steps` and `lr_scheduler_type`
    have no effect.
    """

    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    adam_beta2: float = 0.95
    weight_decay: float = 0.01
    optim: str = "adamw_torch_fused"
    eval_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int = 2
    logging_steps: float = 25
    load_best_model_at_end: bool = True
    metric_for_best_model: str = "eval_tau"
    greater_is_better: bool = True
    ddp_timeout: int = 86400  # one process may write answers for hours while the others wait
    # Values of options in `TRAINING_OPTIONS`, such as `ctc_labels`; `training_arguments` sets them
    method_options: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        choices = {"objective": _OBJECTIVES, "data_policy": DATA_POLICIES, "depth_weighting": _DEPTH_WEIGHTINGS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: expected one of {', '.join(known)}")
        if self.ce_share is not None:
            objective_of(self.objective, self.ce_share)  # raises if the objective has no such share
        for name, default in (("depth_weights", None), ("depth_decay", LearningOptions.depth_decay)):
            if self.depth_weighting in WEIGHTINGS and getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)} is invalid with depth_weighting={self.depth_weighting!r}, which "
                    "weighs depths itself: leave one or the other out"
                )
        DATA_POLICIES[self.data_policy].check(self)
        if not 0.0 < self.rolled_fraction <= 1.0:
            raise ValueError(f"rolled_fraction={self.rolled_fraction} is invalid: expected above 0, at most 1")
        if self.depth_weights is not None and (min(self.depth_weights) < 0 or sum(self.depth_weights) <= 0):
            raise ValueError(f"depth_weights={self.depth_weights} is invalid: expected numbers of 0 or more, not all 0")
        check_limits(self)
        if self.fp16:
            raise ValueError("fp16 would lose gradients, which are made before the loss is scaled; use bf16")
        for name in _MINUTES:
            if (minutes := getattr(self, name)) is not None:
                if minutes <= 0:
                    raise ValueError(f"{name}={minutes} is invalid: expected above 0")
                self.max_steps = 10**9
        self.remove_unused_columns = False
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """Returns all arguments, those of methods included, as trackers record them."""
        return {**super().to_dict(), **self.method_options}

    @property
    def terms(self) -> dict[str, Term]:
        """What methods do to the loss, by option."""
        made = {name: TRAINING_OPTIONS[name].term(self, value) for name, value in self.method_options.items() if value}
        made["depth_weighting"] = WEIGHTINGS.get(self.depth_weighting)
        return {name: term for name, term in made.items() if term is not None}

    def weights_of_depths(self, steps: int) -> list[float]:
        """Returns the weight of each of K depths; a ValueError if `depth_weights` has another length."""
        if self.depth_weighting in WEIGHTINGS:
            return [1.0] * steps
        if self.depth_weights is None:
            return [self.depth_decay**depth for depth in range(steps)]
        if len(self.depth_weights) != steps:
            raise ValueError(f"depth_weights has {len(self.depth_weights)} entries, the drafter {steps} draft steps")
        return list(self.depth_weights)

    def check_metric(self, steps: int, generates: bool) -> None:
        """Raises a ValueError if an evaluation would not measure `metric_for_best_model`.

        `steps` is K; `generates` says whether evaluations decode held-out prompts.
        """
        depths = range(1, steps + 1)
        known = ["loss", *(f"accuracy_{depth}" for depth in depths)]
        if generates:
            known = ["tau", "parity", *known, *(f"acceptance_{depth}" for depth in depths)]
        metric = str(self.metric_for_best_model).removeprefix("eval_")
        if self.load_best_model_at_end and metric not in known:
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model!r} will not be measured"
                f"{'' if generates else ' without prompts to decode (--eval-prompts)'}: expected one of "
                f"{', '.join(f'eval_{name}' for name in known)}"
            )


@patch_environment(accelerate_use_fsdp="false", accelerate_use_deepspeed="false")
def training_arguments(out: Path, overrides: Mapping[str, Any], device_type: str) -> DrafterTrainingArguments:
    """Makes the arguments of a run in folder `out`; `overrides` are fields that differ from their defaults.

    Raises:
        ValueError: arguments contradict each other.
        TypeError: there is no such argument.
    """
    taken = sorted({"output_dir", "resume_from_checkpoint"} & overrides.keys())
    if taken:
        raise ValueError(f"{' and '.join(taken)}: --out decides; a run resumes from its own last checkpoint")
    clocked = sorted({"max_steps", "num_train_epochs", "warmup_steps", "lr_scheduler_type"} & overrides.keys())
    timed = [name for name in _MINUTES if overrides.get(name) is not None]
    if timed and (clocked or len(timed) > 1):
        raise ValueError(
            f"{', '.join([*clocked, *timed[1:]])} would have no effect with {timed[0]}: leave one or the other out"
        )
    options = {name: overrides[name] for name in TRAINING_OPTIONS if name in overrides}
    fields = {"output_dir": str(out / "checkpoints"), "use_cpu": device_type == "cpu", **overrides}
    fields = {name: value for name, value in fields.items() if name not in options}
    fields["push_to_hub"] = False  # push the finished drafter, not the checkpoints
    fields.setdefault("disable_tqdm", True)  # the run reports its progress itself
    if "num_train_epochs" in fields and "max_steps" not in fields:
        fields["max_steps"] = -1
    for name in ("fsdp", "deepspeed"):
        if fields.get(name):
            raise ValueError(f"--{name} would shard the drafter, which is small; `accelerate launch` shards the target")
    if "eval_steps" in fields and "save_steps" not in fields:
        fields["save_steps"] = fields["eval_steps"]  # every checkpoint has to be measured
    # The state is made here: the arguments' would time out after half an hour on CPUs.
    timeout = timedelta(seconds=fields.get("ddp_timeout", DrafterTrainingArguments.ddp_timeout))
    PartialState(cpu=fields["use_cpu"], timeout=timeout)
    args = DrafterTrainingArguments(**fields)
    for name, value in options.items():
        if value is not None:
            TRAINING_OPTIONS[name].check(args, value)
            args.method_options[name] = value
    # A process trains on one device. For several devices, `accelerate launch` starts several processes.
    args._n_gpu = min(args.n_gpu, 1)
    for tracker in get_reporting_integration_callbacks(args.report_to):
        tracker()  # raises an error if it is not installed
    return args


def parse_arguments(options: Sequence[str]) -> dict[str, Any]:
    """Parses command-line options of `DrafterTrainingArguments` and of methods to the fields that are given.

    Those in `DRAFTER_OPTIONS` are for the plan's drafter.
    An unknown option, or a value of the wrong type, is a ValueError.
    """
    parser = _Parser(DrafterTrainingArguments, allow_abbrev=False, add_help=False)
    for name, kind in {**{name: each.type for name, each in TRAINING_OPTIONS.items()}, **DRAFTER_OPTIONS}.items():
        parsed: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", **parsed)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(_with_lists(options)))


def _with_lists(options: Sequence[str]) -> list[str]:
    """Splits depth weights that are given as 1,0.5,0.25."""
    result: list[str] = []
    for option in options:
        after = result[-1] if result else ""
        result += option.split(",") if after in ("--depth-weights", "--depth_weights") else [option]
    return result


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "; expected an option of `hsdraft train --help` or a field of transformers' TrainingArguments"
        raise ValueError(message + (hint if "unrecognized" in message else ""))
