"""Measures the first call of a process, plain and drafted, each in a process of its own.

Every process loads target and drafter, makes one call, and ends. So no earlier call has prepared anything for it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..runtime.prompt_inputs import encode_prompt
from .machine import processor, synchronise

DEFINITION = (
    "seconds: of the first generate() of a process, without loading target and drafter; plain and drafted calls take "
    "turns, each in a process of its own, and every text has exactly so many new tokens; median, with least and "
    "greatest in brackets. time: the drafted median over the plain one; below 1 is quicker."
)


@dataclass(frozen=True)
class FirstCalls:
    """What was measured of the first calls of one length.

    Attributes:
        new_tokens: number of tokens that each call emits.
        plain: seconds of each plain call.
        drafted: seconds of each drafted call.
    """

    new_tokens: int
    plain: list[float]
    drafted: list[float]

    @property
    def time_ratio(self) -> float:
        """Median seconds of the drafted calls divided by those of the plain ones."""
        return statistics.median(self.drafted) / statistics.median(self.plain)


def run_first_calls(
    target: str | None,
    drafter: str,
    dtype: torch.dtype,
    device: str,
    prompt: str,
    lengths: Sequence[int],
    repeats: int,
) -> list[FirstCalls]:
    """Measures calls of each length, every one in a fresh process.

    Args:
        target: name of the target; `None` for the default one. Every process loads it.
        drafter: name of the drafter. Every process loads it.
        dtype: dtype of both.
        device: device of both.
        prompt: prompt of all calls.
        lengths: numbers of new tokens.
        repeats: number of plain calls and of drafted calls of each length.

    Raises:
        ValueError: there is no length, or one is below 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)} is invalid: expected numbers of at least 1, such as 8,32,128")
    results = []
    for length in lengths:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(repeats):
            for drafted in (False, True) if repeat % 2 == 0 else (True, False):
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    given = target, drafter, dtype, device, prompt, length, drafted
                    seconds[drafted].append(pool.submit(_load_and_time, *given).result())
        results.append(FirstCalls(length, seconds[False], seconds[True]))
    return results


def _load_and_time(
    target: str | None, drafter: str, dtype: torch.dtype, device: str, prompt: str, new_tokens: int, drafted: bool
) -> float:
    from transformers.utils.logging import disable_progress_bar

    from ..generate.by_name import load_drafter
    from ..runtime.target_loading import load_target

    disable_progress_bar()
    loaded = load_drafter(drafter, dtype, device)
    model, tokenizer = load_target(target, dtype, device)
    return time_first_call(model, encode_prompt(tokenizer, prompt, device), new_tokens, loaded if drafted else None)


def time_first_call(target: Any, inputs: dict[str, torch.Tensor], new_tokens: int, drafter: Any = None) -> float:
    """Returns the seconds of one greedy call, which is plain without a drafter."""
    assistant = {} if drafter is None else {"assistant_model": drafter}
    synchronise(target.device)
    begin = time.perf_counter()
    target.generate(**inputs, **assistant, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    synchronise(target.device)
    return time.perf_counter() - begin


def print_first_calls(results: Sequence[FirstCalls], console: Console) -> None:
    table = Table()
    for column in ("new tokens", "plain s", "drafted s", "time"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(str(row.new_tokens), _shown(row.plain), _shown(row.drafted), f"{row.time_ratio:.2f}")
    console.print(table)
    console.print(f"processor: {processor(torch.device('cpu'))}", style="dim", highlight=False, markup=False)
    console.print(DEFINITION, style="dim", highlight=False, markup=False)


def _shown(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}..{max(seconds):.2f})"
