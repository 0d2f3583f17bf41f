"""The drafter that a run starts from: another drafter, or a fresh one; and LoRA on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from ..data.plan import Report, TrainingPlan
from ..data.vocabulary import choose_draft_vocabulary, column_cost_of, paying_size
from ..families.family import GROWTHS, TrainableFamily
from .run_folder import keep_vocabulary, vocabulary_of


def drafter_to_start_from(family: TrainableFamily, target: Any, tokenizer: Any, plan: TrainingPlan) -> Any:
    """Loads the drafter to start from; returns `None` if the plan names none.

    One for another target or tokenizer, of another family, or without the sizes that the plan asks for is a ValueError.
    """
    if plan.init_from is None:
        return None
    if (Path(plan.init_from) / "adapter_config.json").is_file():
        raise ValueError(f"{plan.init_from} is an adapter, not a drafter: start from the drafter that it adapts")
    drafter = family.loaded(plan.init_from, target, plan.drafter)
    family.check_start(drafter, target, tokenizer)
    fixed = sorted(plan.drafter.keys() - {"target_name"})
    if plan.lora is not None and fixed:
        raise ValueError(f"LoRA keeps the sizes of {plan.init_from}: leave {', '.join(fixed)} out")
    if (grow := GROWTHS.get(family.name)) is not None:
        drafter = grow(drafter, plan.drafter)
    family.continued(drafter, plan.drafter)
    size = plan.drafter.get("draft_vocab_size", 1)
    if not 1 <= size <= drafter.config.vocab_size:
        raise ValueError(f"draft_vocab_size={size} is invalid: expected 1 to {drafter.config.vocab_size}")
    return drafter


def draft_vocabulary(
    family: TrainableFamily, target: Any, tokenizer: Any, tokenized: Sequence[Any], plan: TrainingPlan, report: Report
) -> list[int]:
    """Returns the token ids of a plan's draft vocabulary, see `choose_draft_vocabulary`.

    A resumed run keeps those that it began with. Without a `draft_vocab_size` there are as many as pay.
    """
    out, size = Path(plan.out), plan.drafter.get("draft_vocab_size")
    begun = vocabulary_of(out)
    if isinstance(begun, list):
        return begun
    always = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    vocab_size, size = target.config.get_text_config().vocab_size, begun or size
    if size is None:
        with torch.device("meta"):
            column_cost = column_cost_of(family.untrained(target, plan.drafter), target)
        size = paying_size(tokenized, vocab_size, column_cost)
    chosen = choose_draft_vocabulary(tokenized, vocab_size, size, always)
    report(f"draft vocabulary: {len(chosen.ids):,} tokens cover {chosen.coverage:.1%} of the answers")
    if PartialState().is_main_process:
        keep_vocabulary(out, chosen.ids)
    return chosen.ids


def with_lora(drafter: Any, rank: int, name: str | None = None) -> Any:
    """Returns a PEFT model that trains low-rank updates of all linear layers of a drafter, and nothing else.

    The updates are scaled by 2 (`lora_alpha = 2 * rank`). The model's `save_pretrained` writes an adapter, which
    `drafter.load_adapter(folder)` puts on the base drafter. The option `adapter_name` chooses one of several in a call.
    `name` is the adapter's, "default" by default.

    Raises:
        ImportError: peft is missing.
        ValueError: the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"lora rank {rank} is invalid: expected 1 or more")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install -e '.[train]' in a checkout") from error
    names = sorted({name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, bias="none")
    return get_peft_model(drafter, config, adapter_name=name or "default")
