"""Inputs of `generate()` for user messages, how far an answer may grow, and which tokens end it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..core.checks import printable
from ..core.tensors import device_of
from .target_limits import furthest_position


def encode_batch(tokenizer: Any, prompts: Sequence[str], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Returns the inputs of several user messages, padded on the tokenizer's side.

    A message is put in the chat template if the tokenizer has one; else it is plain text.
    """
    plain, texts = not getattr(tokenizer, "chat_template", None), list(prompts)
    if not plain:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts
        ]
    encoding = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, add_special_tokens=plain)
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_prompt(tokenizer: Any, prompt: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the inputs of one user message; see `encode_batch`."""
    return encode_batch(tokenizer, [prompt], device)


def length_of(tokenizer: Any, prompt: str) -> int:
    """Returns the number of tokens of a user message, chat template included."""
    return encode_prompt(tokenizer, prompt)["input_ids"].shape[1]


def encode_prompts(target: Any, tokenizer: Any, prompts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Returns the inputs of each of several user messages; raises a ValueError if one fills the context window."""
    encoded = [encode_prompt(tokenizer, prompt, target.device) for prompt in prompts]
    for prompt, inputs in zip(prompts, encoded, strict=True):
        try:
            room_left(target, inputs["input_ids"].shape[1])
        except ValueError as error:
            raise ValueError(f"{printable(prompt, 60)}: {error}") from None
    return encoded


def room_left(target: Any, length: int) -> int:
    """Returns the number of tokens that fit behind a prompt; raises a ValueError if the prompt fills the context
    window.

    transformers would read such a prompt anyway and output noise.
    """
    window = furthest_position(target)
    if length >= window:
        raise ValueError(
            f"the prompt has {length} tokens and the model's context window is {window}: "
            f"shorten it to {window - 1} tokens or fewer"
        )
    return window - length


def end_tokens(target: Any, config: Any = None) -> set[int]:
    """Returns the ids of the tokens that end an answer, by `config` or else by the target's generation config."""
    configs = (config, target.generation_config)
    found: Any = next((each.eos_token_id for each in configs if each is not None and each.eos_token_id is not None), [])
    return set(found) if isinstance(found, list | tuple) else {found}


def inputs_of(target: Any, text: Sequence[int], begin: int = 0) -> dict[str, torch.Tensor]:
    """Returns the inputs `[1, n]`, int64, of a forward over a text from position `begin` on.

    Without positions, models whose positions depend on images would use those of an earlier call, and keep this text's.
    """
    ids = torch.tensor([list(text)[begin:]], device=device_of(target))
    places = {"position_ids": torch.arange(begin, len(text), device=ids.device)[None]}
    return {"input_ids": ids} | (places if "position_ids" in inspect.signature(target.forward).parameters else {})
