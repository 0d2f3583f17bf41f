"""Measures the memory of several calls at once. Each number of calls is measured in a process of its own.

Every process loads target and drafter and makes one plain call. Then it makes its calls with the drafter. What they add
is the peak of resident memory while they run, less the memory held before.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..runtime.prompt_inputs import encode_prompt
from .machine import PeakMemory

_MB = 10**6
DEFINITION = (
    "added MB: peak of resident memory while the calls run, less the memory held after loading and one plain call. "
    "packed: number of calls that used packed weights, at least in their later rounds."
)


@dataclass(frozen=True)
class ConcurrentCalls:
    """What was measured of one number of calls.

    Attributes:
        calls: number of calls at once, each in a thread of its own.
        packed: number of calls that used packed weights.
        before: bytes of resident memory before the calls.
        peak: greatest number of bytes of resident memory while they ran.
    """

    calls: int
    packed: int
    before: int
    peak: int

    @property
    def added(self) -> float:
        """Number of megabytes that the calls took."""
        return (self.peak - self.before) / _MB


def run_concurrent(
    target: str | None,
    drafter: str,
    dtype: torch.dtype,
    prompts: Sequence[str],
    counts: Sequence[int],
    max_new_tokens: int,
    packed_weights: bool | None,
) -> list[ConcurrentCalls]:
    """Measures each number of calls in a fresh process.

    Args:
        target: name of the target; `None` for the default one. Every process loads it.
        drafter: name of the drafter. Every process loads it.
        dtype: dtype of both.
        prompts: prompts, which the calls take in turn.
        counts: numbers of calls at once.
        max_new_tokens: number of new tokens of each call.
        packed_weights: the drafter's option of that name; `None` leaves it as it is.

    Raises:
        ValueError: a count is below 1, or the system does not tell the peak of a process's memory.
    """
    if min(counts) < 1:
        raise ValueError(f"calls={min(counts)} is invalid: expected numbers of at least 1")
    results = []
    for count in counts:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            given = target, drafter, dtype, list(prompts), count, max_new_tokens, packed_weights
            results.append(pool.submit(_load_and_measure, *given).result())
    return results


def _load_and_measure(
    target: str | None,
    drafter: str,
    dtype: torch.dtype,
    prompts: Sequence[str],
    count: int,
    max_new_tokens: int,
    packed_weights: bool | None,
) -> ConcurrentCalls:
    from ..generate.by_name import load_drafter
    from ..runtime.target_loading import load_target

    loaded = load_drafter(drafter, dtype)
    if packed_weights is not None:
        loaded.generation_config.packed_weights = packed_weights
    model, tokenizer = load_target(target, dtype)
    inputs = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    return measure_calls(model, loaded, [inputs[index % len(inputs)] for index in range(count)], max_new_tokens)


def measure_calls(
    target: Any, drafter: Any, inputs: Sequence[dict[str, torch.Tensor]], max_new_tokens: int
) -> ConcurrentCalls:
    """Makes one plain call, and then decodes all inputs at once, each in a thread of its own.

    Raises:
        ValueError: the system does not tell a process's peak of memory.
    """
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "do_sample": False}
    target.generate(**inputs[0], **settings)
    together = threading.Barrier(len(inputs))

    def call(each: dict[str, torch.Tensor]) -> bool:
        together.wait()
        output = target.generate(**each, **settings, assistant_model=drafter, return_dict_in_generate=True)
        return output.statistics.packed_weights

    memory = PeakMemory(torch.device("cpu"))
    before = memory.start()
    with ThreadPoolExecutor(len(inputs)) as threads:
        packed = sum(threads.map(call, inputs))
    peak = memory.peak()
    if before is None or peak is None:
        raise ValueError("this system does not tell the peak of a process's memory: measure on Linux")
    return ConcurrentCalls(len(inputs), packed, before, peak)


def print_concurrent(results: Sequence[ConcurrentCalls], console: Console) -> None:
    table = Table()
    for column in ("calls at once", "packed", "added MB", "MB before"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(str(row.calls), f"{row.packed}/{row.calls}", f"{row.added:.0f}", f"{row.before / _MB:.0f}")
    console.print(table)
    console.print(DEFINITION, style="dim")
