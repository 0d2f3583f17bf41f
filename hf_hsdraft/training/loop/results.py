"""What a run leaves: the drafter or adapter, its recipe, figures, pictures and card, in a folder and on the Hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers import __version__ as transformers_version

from ..._version import __version__
from ...core.checks import public_name
from ...core.methods import load, offered
from ...core.progress import Reporter
from ...drafters.base.auto_drafter import AutoDrafter
from ...hub.drafter_files import DOCUMENTS, FIGURES, RECIPE, read_json
from ...hub.model_card import read_recipe, write_card
from ...hub.publication import push
from ..data.plan import TrainingPlan
from ..families.family import TrainableFamily
from ..files import write_json
from ..loss.objectives import OBJECTIVES
from .arguments import DrafterTrainingArguments
from .run_folder import ended_untrained
from .trainer import DrafterTrainer

_MANY, _ENOUGH = 10_000, 300  # answer tokens and steps, fewer of which explain that a drafter is untrained


def save(
    trainer: DrafterTrainer, plan: TrainingPlan, family: TrainableFamily, data: dict[str, Any], report: Reporter
) -> None:
    """Saves what a run has made into its folder. `data` holds lines for the card about the texts."""
    out = plan.results
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if plan.lora is None:
        model.loss_function = None
        model.to(torch.bfloat16).save_pretrained(out)
    else:
        readme = Path(plan.out) / "README.md"
        before = readme.read_text(encoding="utf-8") if readme.exists() else None
        model.save_pretrained(plan.out)  # PEFT writes an empty card too, and a named adapter into its folder
        readme.unlink(missing_ok=True)
        if before is not None:
            readme.write_text(before, encoding="utf-8")
    history = trainer.state.log_history
    calibration = asdict(trainer.calibration) if trainer.calibration else None
    figures = [{name: None if value != value else value for name, value in entry.items()} for entry in history]
    held_out = f"{trainer.held_out[0]} conversations; tau: {trainer.held_out[1]} prompts, at most "
    held_out += f"{trainer.args.eval_new_tokens} tokens each"
    training = {"history": figures, "calibration": calibration, "held_out": held_out, "tau": _tau(trainer)}
    write_json(out / FIGURES, {"training": training})
    if not trainer.budget.remaining:
        report("no pictures: the time is over")
    else:
        with report.stage("drawing", "pictures") as stage:
            draw_pictures(history, calibration, out, stage)
    recipe: dict[str, Any] = {"training": {**data, **_recipe(trainer, plan, family)}}
    recipe["target"] = trainer.drafter.config.target_name  # a language model's config.json does not name it
    if plan.dataset is not None:
        recipe["datasets"] = [public_name(plan.dataset)]
    if plan.lora is not None:
        recipe["adapts"] = public_name(str(plan.init_from))
        recipe |= {"adapter_name": plan.adapter_name} if out != Path(plan.out) else {}
    write_json(out / RECIPE, recipe)
    write_card(out, Path(plan.out).resolve().name)


def draw_pictures(*given: Any) -> None:
    """As in `methods/pictures/training_pictures.py`, where that is here."""
    if offered("drawing"):
        load("drawing", "training").draw_pictures(*given)


class RenewedPictures(TrainerCallback):
    """Draws the pictures of a run into its folder again after each evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            draw_pictures(state.log_history, None, self._folder)


def _tau(trainer: DrafterTrainer) -> float | None:
    """The saved drafter's tau: that of the best checkpoint, or else of the last evaluation."""
    measured = {entry["step"]: entry["eval_tau"] for entry in trainer.state.log_history if "eval_tau" in entry}
    best = trainer.state.best_model_checkpoint
    last = next(reversed(measured.values()), None)
    return measured.get(int(best.rsplit("-", 1)[1]), last) if best else last


def untrained(history: Sequence[Mapping[str, Any]], steps: int) -> bool:
    """Whether the last evaluation says that drafts are still noise.

    Frequent pairs of tokens alone are right about fewer than a fifth of first tokens, or in the first 200 steps and in
    short answers about two fifths.
    """
    found = [entry["eval_accuracy_1"] for entry in history if "eval_accuracy_1" in entry]
    return bool(found) and found[-1] < (0.4 if steps < 200 else 0.2)


def what_is_needed(out: Path, goes_on: bool) -> str:
    """Says that a run's drafter is untrained and what it needs; empty if it is trained.

    `goes_on` says whether the same command trains on.
    """
    if not (ended := ended_untrained(out)):
        return ""
    steps, limits = ended["steps"], ended.get("limits", {})
    timed = any("minutes" in name for name in limits)
    told = "this drafter is untrained and will not speed anything up"
    answers = ended.get("amount", {}).get("answers", _MANY)
    how = "the same command trains on for as long again" if goes_on else "the same command with a wider limit trains on"
    if answers < _MANY:
        had = f"only {answers:,} answer tokens from {ended['amount']['chats']:,} chats; a useful run has some 25,000"
        more = f"{how} and makes more answers" if "max_minutes" in limits else "start a new run with more prompts"
        return f"{told}: it had {had}; {more}"
    count = f"{steps} step{'s' * (steps != 1)}"
    made = f"the machine made {count} in its time" if timed else f"it was trained for {count}"
    made += ", it needs some hundreds" if steps < _ENOUGH else ", these were not enough"
    return f"{told}: {made}; {how}"


def result_of(out: Path) -> str:
    """Returns the result of the run in a folder, in a line."""
    figures = (read_json(out / FIGURES).get("training") or {}) if (out / FIGURES).is_file() else {}
    if not figures.get("tau"):
        return f"drafter saved in {out}"
    how = f"tokens per target forward, bonus included; {figures['held_out']}"
    return f"tau {figures['tau']:.2f} ({how}), drafter saved in {out}"


def saved(plan: TrainingPlan, family: TrainableFamily) -> Any:
    """Loads the drafter that a run has saved."""
    if plan.lora is None:
        return family.drafter.from_pretrained(plan.out)
    drafter = family.drafter.from_pretrained(plan.init_from)
    drafter.load_adapter(str(plan.out), adapter_name=plan.adapter_name)
    return drafter


def publish(plan: TrainingPlan, repo_id: str, token: str | None) -> None:
    """Uploads the drafter (or adapter), card, figures and pictures of a finished run, but no data and checkpoints."""
    folder = plan.results
    commit: dict[str, Any] = {"token": token, "commit_message": "Drafter trained by hsdraft"}
    if plan.lora is not None:
        push(folder, repo_id, **commit)
        return
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place)
        AutoDrafter.from_pretrained(folder).save_pretrained(staged)
        for name in DOCUMENTS:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, staged / name)
        push(staged, repo_id, **commit)


def name_data_set(plan: TrainingPlan, name: str) -> None:
    """Names a data set of the Hub in the recipe and the card of a run's drafter."""
    folder = plan.results
    named = read_recipe(folder).get("datasets", [])
    if name not in named:
        write_json(folder / RECIPE, {**read_json(folder / RECIPE), "datasets": [*named, name]})
        write_card(folder, Path(plan.out).resolve().name)


def _recipe(trainer: DrafterTrainer, plan: TrainingPlan, family: TrainableFamily) -> dict[str, Any]:
    """Returns the lines of the card that say how the drafter was trained."""
    args, drafter = trainer.args, trainer.drafter
    size = sum(parameter.numel() for parameter in drafter.parameters())
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    start = plan.init_from and public_name(plan.init_from)
    recipe = {
        "target": f"{drafter.config.target_name} ({trainer.target.dtype})",
        "family": family.name,
        "drafter": f"{size / 1e6:.1f}M parameters, taps {list(family.taps(drafter, trainer.target))}, "
        f"{drafter.num_draft_steps} draft steps, {family.describe(drafter)}, draft vocabulary "
        f"{len(trainer.weights.vocab_ids):,}",
        "started from": start if plan.lora is None else f"{start}, with LoRA of rank {plan.lora}",
        "loss": what_is_computed(trainer),
        "steps": f"{trainer.state.global_step:,} of {batch} conversations, learning rate {args.learning_rate:g}, "
        f"{getattr(args.optim, 'value', args.optim)}, seed {args.seed}, "
        f"{'bfloat16 autocast' if args.bf16 else 'float32'}",
        "weights": "saved in bfloat16, trained in float32",
        "software": f"hf_hsdraft {__version__}, transformers {transformers_version}, torch {torch.__version__}",
    }
    return {title: value for title, value in recipe.items() if value is not None}


def what_is_computed(trainer: DrafterTrainer) -> str:
    """Describes the loss, and what is compared at a time."""
    args = trainer.args
    options = "".join(f" ({name} {value})" for name, value in args.method_options.items())
    return (
        f"{_objective(args)} on {args.data_policy} data{options}; at most {args.chains_per_conversation} chains "
        f"a conversation, {args.rolled_fraction:.0%} of them {trainer.drafter.num_draft_steps} deep, "
        f"{_weights(trainer)}; {_compared(trainer)}"
    )


def _compared(trainer: DrafterTrainer) -> str:
    args = trainer.args
    if getattr(trainer.loss, "candidates", None) is not None:
        return f"the {args.candidates} likely tokens of each position compared, and {args.drawn_candidates} drawn ones"
    size = len(trainer.weights.vocab_ids)
    return f"logits of {trainer.loss.rows_per_chunk} predictions x {size:,} tokens at a time"


def _objective(args: DrafterTrainingArguments) -> str:
    objective = OBJECTIVES.get(args.objective)
    share = args.ce_share if args.ce_share is not None or objective is None else objective.ce_share
    return f"{args.objective} (ce_share {share:g})" if share else args.objective


def _weights(trainer: DrafterTrainer) -> str:
    numbers = ", ".join(f"{weight:.2f}" for weight in trainer.loss.depth_weights)
    own = {"fixed": "depth weights", "by-prediction": "weights of predictions by depth"}
    return f"{own.get(kind := trainer.args.depth_weighting, f'depth weights by {kind}')} {numbers}"
