"""LoRA on a drafter: another target or domain for a few hundred kilobytes, as an ordinary PEFT adapter."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..drafters.hidden_state.modeling_hsdraft import HSDrafter


def with_lora(drafter: HSDrafter, rank: int) -> Any:
    """A PEFT model that trains low-rank updates of all of a drafter's linear layers, and nothing else.

    Its `save_pretrained` writes an adapter; `HSDrafter.load_adapter(folder)` puts it on the base drafter, `set_adapter`
    and `disable_adapters` switch between calls.

    Args:
        rank: of each update, 1 or more; scaled by 2 (`lora_alpha = 2 * rank`).

    Raises:
        ImportError: peft is missing.
        ValueError: the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"lora rank {rank} is invalid: expected 1 or more")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'hf-hsdraft[train]'") from error
    names = sorted({name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)})
    return get_peft_model(drafter, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, bias="none"))
