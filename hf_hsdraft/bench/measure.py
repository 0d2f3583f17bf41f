"""Measurements of decoding. Every figure has one definition, which is printed with it.

- tau: number of tokens emitted per target forward, bonus tokens included; plain decoding has exactly 1.
- tokens/s: number of new tokens per second of `generate()`, the prompt's forward included.
- speed-up: tokens/s divided by those of plain `generate()`, with the same settings and process, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.checks import printable
from ..engine.call_output import DraftStatistics
from ..runtime.answer_limits import room_left

DEFINITIONS = (
    "tau: tokens emitted per target forward, bonus included (plain decoding: 1). "
    "speed-up: tokens/s over plain generate(), same settings and process, alternating."
)


def encode_prompt(tokenizer: Any, prompt: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the inputs of a user's message: in the chat template if the tokenizer has one, else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        encoding = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoding = tokenizer(prompt, return_tensors="pt")
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_prompts(target: Any, tokenizer: Any, prompts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Returns the inputs of several users' messages, each by itself. See `encode_prompt`.

    Raises:
        ValueError: a prompt fills the target's context window.
    """
    encoded = [encode_prompt(tokenizer, prompt, target.device) for prompt in prompts]
    for prompt, inputs in zip(prompts, encoded, strict=True):
        try:
            room_left(target, inputs["input_ids"].shape[1])
        except ValueError as error:
            raise ValueError(f"{printable(prompt, 60)}: {error}") from None
    return encoded


def encode_batch(tokenizer: Any, prompts: Sequence[str], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Returns the inputs of several users' messages, padded on the tokenizer's side. See `encode_prompt`."""
    plain = not getattr(tokenizer, "chat_template", None)
    texts = list(prompts)
    if not plain:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts
        ]
    encoding = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=plain)
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}


def end_tokens(target: Any) -> set[int]:
    """Returns the tokens that end a text of the target."""
    ends = target.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list | tuple) else {ends} - {None}


def pooled_tau(statistics: Sequence[DraftStatistics]) -> float:
    """Returns tau over several calls: all emitted tokens per target forward, each counted for every row."""
    forwards = sum(call.row_forwards for call in statistics)
    return sum(call.new_tokens for call in statistics) / max(forwards, 1)


@dataclass(frozen=True)
class Divergence:
    """The first place where two texts differ.

    Attributes:
        step: index of the first new token that differs.
        margin: difference between the target's two greatest logits there, in one plain forward over the shared text.
            Where it is tiny, rounding decides. `None` for sampled texts, about which it says nothing.
    """

    step: int
    margin: float | None

    def __str__(self) -> str:
        if self.margin is None:
            return f"no: differs from new token {self.step}"
        return f"no: differs from new token {self.step}, where the target's top-1/top-2 margin is {self.margin:.1e}"


@torch.inference_mode()
def first_divergence(target: Any, prompt_length: int, plain: torch.Tensor, other: torch.Tensor) -> Divergence | None:
    """Compares two outputs of `generate()`, each `[1, length]`. Returns `None` if they hold the same tokens."""
    shared = min(plain.shape[1], other.shape[1])
    differing = torch.nonzero(plain[0, :shared] != other[0, :shared]).flatten().tolist()
    if not differing and plain.shape[1] == other.shape[1]:
        return None
    first = differing[0] if differing else shared
    logits = target(plain[:, :first], logits_to_keep=1, use_cache=False).logits[0, -1].float()
    best = logits.topk(2).values
    return Divergence(first - prompt_length, float(best[0] - best[1]))
