"""What a target makes of the prompts of the bench `remote_sessions` by itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_hsdraft.bench.calls import DEFAULT_PROMPTS
from hf_hsdraft.runtime.target_loading import load_target
from remote_bench.clients import Beats, options_of


@dataclass(frozen=True)
class Plain:
    """What the target makes of the prompts by itself."""

    prompts: list[list[int]]  # their token ids
    texts: list[list[int]]  # of plain `generate()`, by prompt
    rows: list[dict[str, Any]]  # figures of one call of `generate()` for as many texts as there are devices


def plain_texts(asked: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> Plain:
    """Returns the target's own texts for the prompts; `tell` gets each row."""
    target, tokenizer = load_target(asked.target, torch.float32, "cpu")
    prompts, texts = [], []
    for seed, prompt in enumerate(DEFAULT_PROMPTS):
        turns = [{"role": "user", "content": prompt.turns[0]}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        torch.manual_seed(seed)
        output = target.generate(**ids, **options_of(asked))
        prompts.append(ids["input_ids"][0].tolist())
        texts.append(output[0].tolist())
    rows = []
    if "generate" in asked.drafter and not asked.soak_minutes:
        for count in asked.sessions:
            rows.append(generated(asked, target, prompts, texts, count))
            tell(rows[-1])
    return Plain(prompts, texts, rows)


def generated(
    asked: argparse.Namespace, target: Any, prompts: Sequence[list[int]], texts: Sequence[list[int]], count: int
) -> dict[str, Any]:
    """Decodes as many texts as there are devices by one call of `generate()`, padded at the left; returns figures."""
    rows = [prompts[place % len(prompts)] for place in range(count)]
    longest, beats = max(map(len, rows)), Beats()
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    began = time.monotonic()
    output = target.generate(ids, attention_mask=mask, streamer=beats, **options_of(asked)).tolist()
    ended, first = time.monotonic(), beats.beats[0][0]
    new, same = 0, 0
    for place, row in enumerate(output):
        text = texts[place % len(texts)]
        new += len(text) - len(rows[place])
        same += row[longest - len(rows[place]) :][: len(text)] == text
    return {
        "drafter": "generate",
        "sessions": count,
        "round_trip_ms": 0.0,
        "mbit": None,
        "tokens_per_second": new / (ended - began),
        "decode_tokens_per_second": (new - count) / max(ended - first, 1e-9),
        "each": (new - count) / count / max(ended - first, 1e-9),
        "same": None if asked.sample else same,  # the texts of a batch draw by other random numbers
        "texts": count,
        "seconds": ended - began,
    }
