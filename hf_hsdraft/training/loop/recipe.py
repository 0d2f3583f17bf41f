"""Describes how a drafter was trained, for the log and the card."""

from __future__ import annotations

from typing import Any

import torch
from transformers import __version__ as transformers_version

from ..._version import __version__
from ...core.checks import public_name
from ..data.plan import TrainingPlan
from ..families.family import TrainableFamily
from ..loss.objectives import CE_SHARES
from .arguments import DrafterTrainingArguments
from .trainer import DrafterTrainer


def training_recipe(trainer: DrafterTrainer, plan: TrainingPlan, family: TrainableFamily) -> dict[str, Any]:
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
    """Describes the terms of the loss, and how many predictions are compared at a time."""
    args, loss = trainer.args, trainer.loss
    options = "".join(f" ({name} {value})" for name, value in args.method_options.items())
    return (
        f"{_terms(args)} on {args.data_policy} data{options}; at most {args.chains_per_conversation} chains "
        f"a conversation, {args.rolled_fraction:.0%} of them {trainer.drafter.num_draft_steps} deep, "
        f"{_weights(trainer)}; logits of {loss.rows_per_chunk} predictions x {len(trainer.weights.vocab_ids):,} "
        "tokens at a time"
    )


def _terms(args: DrafterTrainingArguments) -> str:
    share = CE_SHARES.get(args.objective) if args.ce_share is None else args.ce_share
    terms = [args.objective if share is None else f"{args.objective} (ce_share {share:g})"]
    if args.cosine_weight > 0:
        terms.append(f"{args.cosine_weight:g} x cosine distance of states")
    if args.regression_weight > 0:
        steps = args.regression_steps
        terms.append(f"{args.regression_weight:g} x regression of states (0 after {steps} steps)")
    return " + ".join(terms)


def _weights(trainer: DrafterTrainer) -> str:
    if trainer.args.depth_weighting == "d-pace":
        return "depth weights by D-PACE"
    numbers = ", ".join(f"{weight:.2f}" for weight in trainer.loss.depth_weights)
    by_prediction = trainer.args.depth_weighting == "by-prediction"
    return f"{'weights of predictions by depth' if by_prediction else 'depth weights'} {numbers}"
