"""LoRA on a drafter: an ordinary PEFT adapter of a few hundred kilobytes, for another target or domain."""

from __future__ import annotations

from typing import Any

from torch import nn


def with_lora(drafter: Any, rank: int) -> Any:
    """Returns a PEFT model that trains low-rank updates of all linear layers of a drafter, and nothing else.

    The updates are scaled by 2 (`lora_alpha = 2 * rank`). The model's `save_pretrained` writes an adapter, which
    `drafter.load_adapter(folder)` puts on the base drafter. `set_adapter` and `disable_adapters` switch between calls.

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
    return get_peft_model(drafter, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, bias="none"))
