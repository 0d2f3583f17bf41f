"""Inputs of `generate()` for user messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.checks import printable
from .answer_limits import room_left


def encode_prompt(tokenizer: Any, prompt: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the inputs of a user message: in the chat template if the tokenizer has one, else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        encoding = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoding = tokenizer(prompt, return_tensors="pt")
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_prompts(target: Any, tokenizer: Any, prompts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Returns the inputs of each of several user messages; raises a ValueError if one fills the context window."""
    encoded = [encode_prompt(tokenizer, prompt, target.device) for prompt in prompts]
    for prompt, inputs in zip(prompts, encoded, strict=True):
        try:
            room_left(target, inputs["input_ids"].shape[1])
        except ValueError as error:
            raise ValueError(f"{printable(prompt, 60)}: {error}") from None
    return encoded


def encode_batch(tokenizer: Any, prompts: Sequence[str], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Returns the inputs of several user messages, padded on the tokenizer's side. See `encode_prompt`."""
    plain = not getattr(tokenizer, "chat_template", None)
    texts = list(prompts)
    if not plain:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts
        ]
    encoding = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=plain)
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}
