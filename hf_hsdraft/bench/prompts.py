"""Prompts to measure with: files of the user or those of the package, longer versions of them, and batches."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..runtime.prompt_inputs import encode_batch, encode_prompt
from ..training.data.conversations import Prompt, read_prompts

Inputs = dict[str, torch.Tensor]

with resources.as_file(resources.files(__package__) / "default_prompts.jsonl") as _file:
    DEFAULT_PROMPTS = tuple(read_prompts(_file))
NOTE = f"no --prompts given: {len(DEFAULT_PROMPTS)} prompts that come with the package"


def read_questions(paths: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """Reads prompt files, or takes the prompts of the package if there is no file; see `spread`.

    Raises a ValueError if a file is missing, or the files hold no prompt.
    """
    found: list[Prompt] = [] if paths else [*DEFAULT_PROMPTS]
    for path in paths:
        if not path.exists():
            raise ValueError(f"--prompts {path} does not exist: expected a JSONL file")
        found += read_prompts(path)
    if not found:
        raise ValueError("no questions: the prompt files hold no line with `turns`")
    return spread(found, limit)


def spread(questions: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Returns at most `limit` questions, in turn from all categories, in file order within each category."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    rounds = max((len(group) for group in groups.values()), default=0)
    ordered = [group[turn] for turn in range(rounds) for group in groups.values() if turn < len(group)]
    return ordered[:limit]


def length_of(tokenizer: Any, prompt: str) -> int:
    """Returns the number of tokens of a user message, chat template included."""
    return encode_prompt(tokenizer, prompt)["input_ids"].shape[1]


def padded_prompt(tokenizer: Any, prompt: str, others: Sequence[str], length: int) -> str | None:
    """Puts as much text of other prompts in front of a prompt as fits into `length` tokens, chat template included.

    Returns the user's turn; `None` if the prompt alone is too long.
    """
    if length_of(tokenizer, prompt) > length:
        return None
    words = " ".join(others).split()
    if not words:
        return prompt
    words = words * (length // len(words) + 1)  # a word has at least one token

    def with_words(count: int) -> str:
        return " ".join(words[len(words) - count :]) + "\n\n" + prompt

    counts = range(1, len(words) + 1)
    most = bisect_right(counts, length, key=lambda count: length_of(tokenizer, with_words(count)))
    return with_words(most) if most else prompt


def padded_batches(tokenizer: Any, prompts: Sequence[str], size: int, device: Any) -> list[Inputs]:
    """Returns left-padded batches of prompts of similar length. Some of the longest prompts may be left out."""
    ordered = sorted(prompts, key=len)
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side, tokenizer.pad_token = "left", pad or tokenizer.eos_token
    try:
        return [
            encode_batch(tokenizer, ordered[start : start + size], device)
            for start in range(0, len(ordered) - size + 1, size)
        ]
    finally:
        tokenizer.padding_side, tokenizer.pad_token = side, pad
