"""The drafter that a run starts from: another drafter, or fresh weights that take some parts from the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from .plan import Report, TrainingPlan
from .vocabulary import choose_draft_vocabulary

_SHORTEST_WINDOW = 128


def drafter_to_start_from(target: Any, plan: TrainingPlan) -> HSDrafter | None:
    """Loads the drafter to start from; returns `None` if the plan names none.

    Raises:
        ValueError: it was made for another target, or it does not have the sizes that the plan asks for.
    """
    if plan.init_from is None:
        HSDraftConfig.for_target(target, **plan.drafter)  # raises where the sizes cannot be
        return None
    if (Path(plan.init_from) / "adapter_config.json").is_file():
        raise ValueError(f"{plan.init_from} is an adapter, not a drafter: start from the drafter that it adapts")
    drafter: HSDrafter = HSDrafter.from_pretrained(plan.init_from, dtype=torch.float32)
    drafter.check(target)
    fixed = sorted(plan.drafter.keys() - {"target_name"})
    if plan.lora is not None and fixed:
        raise ValueError(f"LoRA keeps the sizes of {plan.init_from}: leave {', '.join(fixed)} out")
    drafter.config.target_name = plan.drafter.get("target_name", drafter.config.target_name)
    drafter.loaded_from = None  # its recipe and figures do not hold for the drafter of this run
    drafter.config.target_reference = None  # it is recorded anew at the end
    for name in ("tree_size", "beam_width", "sliding_window"):  # fields on which no weights depend
        if name in plan.drafter:
            setattr(drafter.config, name, plan.drafter[name])
            if name != "sliding_window":
                setattr(drafter.generation_config, name, plan.drafter[name])
    drafter.config.check()
    for name, value in plan.drafter.items():
        found = getattr(drafter.config, name)
        if found != value and name != "draft_vocab_size":
            raise ValueError(
                f"{plan.init_from} has {name}={found!r}, not {value!r}; leave {name} out, or train from scratch"
            )
    size = plan.drafter.get("draft_vocab_size", 1)
    if not 1 <= size <= drafter.config.vocab_size:
        raise ValueError(f"draft_vocab_size={size} is invalid: expected 1 to {drafter.config.vocab_size}")
    return drafter


def config_for(
    target: Any, tokenizer: Any, tokenized: Sequence[Any], plan: TrainingPlan, report: Report
) -> HSDraftConfig:
    """Returns the configuration of a fresh drafter.

    Args:
        target: the target.
        tokenizer: the target's tokenizer.
        tokenized: the conversations that it will learn from.
        plan: the plan of the run.
        report: told of the draft vocabulary.
    """
    longest = max(len(chat.input_ids) for chat in tokenized)  # the drafter learns to look back no further than this
    overrides = {"sliding_window": max(longest, _SHORTEST_WINDOW), **plan.drafter}
    default = HSDraftConfig.for_target(target, **overrides)
    if default.draft_vocab_ids is None and default.draft_vocab_size < default.vocab_size:
        ids = draft_vocabulary(target, tokenizer, tokenized, default.draft_vocab_size, report)
        overrides |= {"draft_vocab_size": len(ids), "draft_vocab_ids": ids}
    return HSDraftConfig.for_target(target, **overrides)


def draft_vocabulary(target: Any, tokenizer: Any, tokenized: Sequence[Any], size: int, report: Report) -> list[int]:
    """Returns the token ids of a draft vocabulary of some size, see `choose_draft_vocabulary`."""
    always = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    chosen = choose_draft_vocabulary(tokenized, target.config.get_text_config().vocab_size, size, always)
    report(f"draft vocabulary: {len(chosen.ids):,} tokens cover {chosen.coverage:.1%} of the answers")
    return chosen.ids


# An untrained drafter gives noise. If its logits were as large as the target's, it would take hundreds of steps to
# unlearn that.
_TIMID_HEAD, _TIMID_INJECTOR = 0.3, 0.2


@torch.no_grad()
def start_from_target(drafter: HSDrafter, target: Any, finals: torch.Tensor) -> None:
    """Takes over from the target what some parts of a fresh drafter need.

    The final norm gets the scale of the target's final hidden states. The injector's output gets the leading directions
    of the target's head. So the head can use both from the first step on.

    Args:
        drafter: the drafter, which is changed.
        target: the target.
        finals: `[N, D]`, float32, some final hidden states of the target.
    """
    if drafter.config.hidden_size != drafter.config.target_hidden_size:
        return
    drafter.norm.weight.copy_(finals.pow(2).mean(dim=0).sqrt())
    rows = target.get_output_embeddings().weight.detach()
    head = rows[drafter.draft_vocab_ids().to(rows.device)].to(drafter.device, torch.float32)
    if drafter.lm_head is not None:
        drafter.lm_head.weight.copy_(head)
    # After the norm's scale, hidden states vary equally in all directions, so the head is scaled in the same way.
    head = head * drafter.norm.weight
    directions = torch.linalg.eigh(head.T @ head).eigenvectors.flip(dims=[1])  # the leading directions first
    leading = head @ directions[:, : drafter.config.injector_rank]
    drafter.injector.up.weight[:, : leading.shape[1]].copy_(_TIMID_INJECTOR * leading)
    drafter.norm.weight.mul_(_TIMID_HEAD)
