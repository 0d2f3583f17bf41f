"""The same comparison at several context lengths, batch sizes, or numbers of new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.prompt_inputs import encode_batch, encode_prompt
from ..runtime.target_limits import text_config
from .calls import Settings
from .run import Inputs, Measured, measure
from .systems import System

CONTEXT, BATCH, NEW = "context_lengths", "batch_sizes", "new_tokens"
MEANING = {
    CONTEXT: "prompts filled up to at most so many tokens, by text of other prompts before them in the user's turn",
    BATCH: "so many prompts a call, of similar length, padded at the left; tokens/s and texts are those of all rows",
    NEW: "greatest number of tokens that a call emits; every call here comes after a warm-up",
}


@dataclass(frozen=True)
class SweepPoint:
    """Measurements at one context length, batch size or number of new tokens.

    `prompt_tokens` is the mean number of tokens of a prompt, without padding.
    """

    value: int
    prompt_tokens: float
    measured: Measured


def check_points(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    context_lengths: Sequence[int],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    new_tokens: Sequence[int] = (),
) -> None:
    """Raises a ValueError if a point cannot be measured with these prompts and this target."""
    window = getattr(text_config(target), "max_position_embeddings", None)
    shortest = min(_length(tokenizer, prompt) for prompt in prompts)
    for length in context_lengths:
        if window is not None and length + max_new_tokens > window:
            raise ValueError(
                f"context length {length} and {max_new_tokens} new tokens are more than the target's {window} positions"
            )
        if length < shortest:
            raise ValueError(f"no prompt is as short as context length {length}: the shortest has {shortest} tokens")
    longest = max(_length(tokenizer, prompt) for prompt in prompts)
    for count in new_tokens:
        if window is not None and longest + count > window:
            raise ValueError(
                f"the longest prompt, of {longest} tokens, and {count} new tokens are more than the target's {window} "
                "positions"
            )
    for size in batch_sizes:
        if size > len(prompts):
            raise ValueError(f"a batch of {size} needs as many prompts; there are {len(prompts)}")


def padded_prompt(tokenizer: Any, prompt: str, others: Sequence[str], length: int) -> str | None:
    """Puts as much text of other prompts in front of a prompt as fits into `length` tokens, chat template included.

    Returns the user's turn; `None` if the prompt alone is too long.
    """
    own = _length(tokenizer, prompt)
    if own > length:
        return None
    words = " ".join(others).split()
    if not words:
        return prompt
    words = words * (length // len(words) + 1)

    def with_words(count: int) -> str:
        return " ".join(words[len(words) - count :]) + "\n\n" + prompt if count else prompt

    low, high = 0, min(len(words), length)  # a word has at least one token
    while low < high:
        middle = (low + high + 1) // 2
        if _length(tokenizer, with_words(middle)) <= length:
            low = middle
        else:
            high = middle - 1
    return with_words(low)


def padded_batches(tokenizer: Any, prompts: Sequence[str], size: int, device: Any) -> list[Inputs]:
    """Returns left-padded batches of prompts of similar length. Some of the longest prompts may be left out."""
    ordered = sorted(prompts, key=len)
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    try:
        tokenizer.padding_side = "left"
        if pad is None:
            tokenizer.pad_token = tokenizer.eos_token
        return [
            encode_batch(tokenizer, ordered[start : start + size], device)
            for start in range(0, len(ordered) - size + 1, size)
        ]
    finally:
        tokenizer.padding_side = side
        if pad is None:
            tokenizer.pad_token = None


def sweep(
    target: Any,
    tokenizer: Any,
    systems: Sequence[System],
    prompts: Sequence[str],
    axis: str,
    values: Sequence[int],
    settings: Settings,
    repeats: int = 1,
) -> Iterator[SweepPoint]:
    """Measures plain decoding and all systems at each value of an axis: `CONTEXT`, `BATCH` or `NEW`."""
    for value in values:
        how = replace(settings, max_new_tokens=value) if axis == NEW else settings
        if axis == CONTEXT:
            texts = [
                padded_prompt(tokenizer, prompt, [*prompts[index + 1 :], *prompts[:index]], value)
                for index, prompt in enumerate(prompts)
            ]
            inputs = [encode_prompt(tokenizer, text, target.device) for text in texts if text is not None]
        elif axis == NEW:
            inputs = [encode_prompt(tokenizer, text, target.device) for text in prompts]
        else:
            inputs = padded_batches(tokenizer, prompts, value, target.device)
        tokens = sum(int(each["attention_mask"].sum()) for each in inputs)
        mean = tokens / sum(len(each["input_ids"]) for each in inputs)
        yield SweepPoint(value, mean, measure(target, systems, inputs, how, repeats))


def _length(tokenizer: Any, prompt: str) -> int:
    return encode_prompt(tokenizer, prompt)["input_ids"].shape[1]
