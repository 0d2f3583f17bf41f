"""Batches: tokens/s with a drafter against plain `generate()`, by batch size, both sides alternating."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from .measure import DEFINITIONS


@dataclass
class Throughput:
    """One batch size.

    Attributes:
        batch_size: prompts a call.
        plain, drafted: seconds and new tokens of the calls, in order.
        row_forwards: target forwards with the drafter, each counted for every row that was still growing.
        same_rows: rows whose text was that of plain decoding, of `rows`.
    """

    batch_size: int
    plain: list[tuple[float, int]] = field(default_factory=list)
    drafted: list[tuple[float, int]] = field(default_factory=list)
    row_forwards: int = 0
    same_rows: int = 0
    rows: int = 0

    @property
    def plain_speed(self) -> float:
        return sum(tokens for _, tokens in self.plain) / sum(seconds for seconds, _ in self.plain)

    @property
    def speed_up(self) -> float:
        drafted = sum(tokens for _, tokens in self.drafted) / sum(seconds for seconds, _ in self.drafted)
        return drafted / self.plain_speed

    @property
    def tau(self) -> float:
        return sum(tokens for _, tokens in self.drafted) / max(self.row_forwards, 1)


def run_throughput(
    target: Any,
    tokenizer: Any,
    drafter: HSDrafter,
    prompts: Sequence[str],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    calls: int,
) -> list[Throughput]:
    """Greedy decoding of batches of prompts, left-padded, in order of length as a batch job would put them.

    Args:
        calls: batches timed for each size.
    """
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    results = []
    for size in batch_sizes:
        result = Throughput(size)
        needed = sorted(prompts[: size * calls], key=len)
        batches = [needed[start : start + size] for start in range(0, len(needed) - size + 1, size)]
        if not batches:
            raise ValueError(f"a batch of {size} needs as many prompts; there are {len(prompts)}")
        for index, batch in enumerate([batches[0], *batches]):
            inputs = _encode(tokenizer, batch, target.device)
            plain = _timed(target, inputs, max_new_tokens if index else 4, None)
            drafted = _timed(target, inputs, max_new_tokens if index else 4, drafter)
            if index:  # the first one warms up
                length = inputs["input_ids"].shape[1]
                result.plain.append((plain[0], _new_tokens(plain[1].sequences, length, target)))
                result.drafted.append((drafted[0], _new_tokens(drafted[1].sequences, length, target)))
                result.row_forwards += drafted[1].statistics.row_forwards
                result.rows += size
                result.same_rows += _same_rows(plain[1].sequences, drafted[1].sequences)
        results.append(result)
    return results


def print_throughput(results: Sequence[Throughput], console: Console) -> None:
    table = Table()
    for column in ("batch", "plain tokens/s", "speed-up", "tau", "rows with the same text"):
        table.add_column(column, justify="right")
    for row in results:
        same = f"{row.same_rows}/{row.rows}"
        table.add_row(str(row.batch_size), f"{row.plain_speed:.0f}", f"{row.speed_up:.2f}", f"{row.tau:.2f}", same)
    console.print(table)
    console.print(DEFINITIONS, style="dim")


def _encode(tokenizer: Any, prompts: Sequence[str], device: Any) -> dict[str, torch.Tensor]:
    texts = prompts
    if getattr(tokenizer, "chat_template", None):
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts
        ]
    encoding = tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=texts is prompts)
    return {name: encoding[name].to(device) for name in ("input_ids", "attention_mask")}


def _timed(target: Any, inputs: dict[str, torch.Tensor], new: int, drafter: HSDrafter | None) -> tuple[float, Any]:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    begin = time.perf_counter()
    given = {} if drafter is None else {"assistant_model": drafter}
    output = target.generate(**inputs, do_sample=False, max_new_tokens=new, return_dict_in_generate=True, **given)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - begin, output


def _new_tokens(sequences: torch.Tensor, length: int, target: Any) -> int:
    """Tokens up to the end of each row; padding after it is none."""
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([ends] if isinstance(ends, int) else ends or [], device=sequences.device)
    ended = torch.isin(sequences[:, length:], ends).long().cumsum(1)
    return int((ended - torch.isin(sequences[:, length:], ends).long() == 0).sum())


def _same_rows(plain: torch.Tensor, drafted: torch.Tensor) -> int:
    length = min(plain.shape[1], drafted.shape[1])
    return int((plain[:, :length] == drafted[:, :length]).all(dim=1).sum())
