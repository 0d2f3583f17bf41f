"""The package `economize` as a system to compare with: its EAGLE-3 drafter, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

Decode = Callable[[torch.Tensor, int], torch.Tensor]


def eagle3_decoder(target: Any, folder: Path, draft_length: int = 4, min_confidence: float | None = None) -> Decode:
    """Greedy decoding of economize with a trained EAGLE-3 drafter; it drafts chains.

    Args:
        folder: what `economize.save` wrote.
        draft_length: tokens drafted per round, its own default.
        min_confidence: drafting stops below this probability; `None` never does.

    Returns:
        a function from token ids `[1, length]` and a number of new tokens to the whole text `[1, length + new]`.

    Raises:
        ImportError: economize is not installed.
    """
    try:
        import economize
    except ImportError as error:
        raise ImportError("the comparison needs economize: pip install --no-deps economize") from error
    checkpoint = economize.read_checkpoint(folder)
    # In the target's dtype, as our drafter: its default is float32.
    model = economize.apply(target, replace(checkpoint.configs[0], param_dtype="model"))
    model.techniques["eagle3"].load_state_dict(checkpoint.states["eagle3"])
    model.eval()
    decoding = economize.DecodeConfig(cycle_length=draft_length, min_confidence=min_confidence)
    ends = target.generation_config.eos_token_id
    stop = list(ends) if isinstance(ends, list | tuple) else [ends]

    def decode(input_ids: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        new = model.decode(input_ids, max_new_tokens, decoding=decoding, stop=stop).tokens
        return torch.cat([input_ids, torch.as_tensor(new, device=input_ids.device).reshape(1, -1)], dim=-1)

    return decode
