"""Tokens/s of batches with a drafter and by plain `generate()`, in turn, for each batch size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..drafters.base.protocol import Drafter
from .calls import until_end
from .machine import synchronise
from .measure import DEFINITIONS
from .sweeps import padded_batches


@dataclass
class Throughput:
    """What was measured of one batch size.

    Attributes:
        batch_size: number of prompts a call.
        plain: seconds and number of new tokens of each plain call.
        drafted: seconds and number of new tokens of each drafted call.
        row_forwards: number of target forwards of the drafted calls, each counted for every row that still grew.
        same_rows: number of rows with plain decoding's text.
        rows: number of rows.
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
    drafter: Drafter,
    prompts: Sequence[str],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    calls: int,
) -> list[Throughput]:
    """Measures greedy decoding of batches, padded at the left. Prompts of similar length go together.

    Args:
        target: the target.
        tokenizer: the target's tokenizer.
        drafter: the drafter.
        prompts: first turns of users.
        batch_sizes: numbers of prompts a call.
        max_new_tokens: greatest number of new tokens of a prompt.
        calls: number of batches of each size.

    Raises:
        ValueError: there are fewer prompts than a batch needs.
    """
    results = []
    for size in batch_sizes:
        result = Throughput(size)
        batches = padded_batches(tokenizer, prompts[: size * calls], size, target.device)
        if not batches:
            raise ValueError(f"a batch of {size} needs as many prompts; there are {len(prompts)}")
        for index, inputs in enumerate([batches[0], *batches]):
            plain = _timed(target, inputs, max_new_tokens if index else 4, None)
            drafted = _timed(target, inputs, max_new_tokens if index else 4, drafter)
            if index == 0:  # the first call warms up
                continue
            length = inputs["input_ids"].shape[1]
            texts = [
                [until_end(row, target) for row in output.sequences[:, length:].tolist()]
                for output in (plain[1], drafted[1])
            ]
            result.plain.append((plain[0], sum(map(len, texts[0]))))
            result.drafted.append((drafted[0], sum(map(len, texts[1]))))
            result.row_forwards += drafted[1].statistics.row_forwards
            result.rows += size
            result.same_rows += sum(one == other for one, other in zip(*texts, strict=True))
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


def _timed(target: Any, inputs: dict[str, torch.Tensor], new: int, drafter: Drafter | None) -> tuple[float, Any]:
    """Returns the seconds of a call and its output."""
    given = {} if drafter is None else {"assistant_model": drafter}
    synchronise(target.device)
    begin = time.perf_counter()
    output = target.generate(**inputs, do_sample=False, max_new_tokens=new, return_dict_in_generate=True, **given)
    synchronise(target.device)
    return time.perf_counter() - begin, output
