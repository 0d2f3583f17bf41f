"""Measurements of decoding. Every figure has one definition, printed with it.

- tau: tokens emitted per target forward, bonus included; plain decoding has exactly 1.
- tokens/s: new tokens over wall-clock seconds of `generate()`, the prompt's forward included.
- speed-up: tokens/s over plain `generate()` with the same settings, in the same process, alternating.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..decoding import DraftStatistics
from ..modeling_hsdraft import HSDrafter

DEFINITIONS = (
    "tau: tokens emitted per target forward, bonus included (plain decoding: 1). "
    "speed-up: tokens/s over plain generate(), same settings and process, alternating."
)


def encode_prompt(tokenizer: Any, prompt: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Model inputs of a user's message: under the chat template if the tokenizer has one, as plain text otherwise."""
    if getattr(tokenizer, "chat_template", None):
        encoding = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoding = tokenizer(prompt, return_tensors="pt")
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}


def pooled_tau(statistics: Sequence[DraftStatistics]) -> float:
    """tau over several calls: all tokens emitted over all target forwards."""
    forwards = sum(call.target_forwards for call in statistics)
    return sum(call.new_tokens for call in statistics) / max(forwards, 1)


def measure_tau(
    target: Any, tokenizer: Any, drafter: HSDrafter, prompts: Sequence[str], max_new_tokens: int
) -> float:
    """tau of greedy decoding with `drafter`, by actually generating."""
    calls = [
        target.generate(
            **encode_prompt(tokenizer, prompt, target.device),
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        ).statistics
        for prompt in prompts
    ]
    return pooled_tau(calls)
