"""Measurements in fresh processes: the first call of a process, and the memory of concurrent calls.

Every process loads target and drafter by name, measures once, and ends. No earlier call has prepared anything for it.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from rich.console import Console

from ...bench.machine import PeakMemory, processor, timed
from ...bench.prompts import Inputs
from ...bench.report import figures_table, note
from ...core.checks import demand
from ...runtime.prompt_inputs import encode_prompt

Found = TypeVar("Found")
_MB = 10**6
FIRST_CALLS = (
    "plain s, drafted s: seconds of the first generate() of a process, without loading target and drafter; plain and "
    "drafted calls take turns, each in a fresh process, and every text has exactly so many new tokens; median, with "
    "least and greatest in brackets. time: the drafted median over the plain one; below 1 is quicker."
)
CONCURRENT = (
    "packed: number of calls that used packed weights, at least in their later rounds. added MB: peak of resident "
    "memory while the calls run, less MB before, the memory held after loading and one plain call."
)


@dataclass(frozen=True)
class Pair:
    """A target and a drafter by name, loaded by every process."""

    target: str | None  # `None` for the default one
    drafter: str
    dtype: torch.dtype
    device: str = "cpu"
    packed_weights: bool | None = None  # the drafter's option of that name; `None` leaves it unchanged

    def in_fresh_process(self, measure: Callable[..., Found], prompts: Sequence[str], *given: Any) -> Found:
        """Returns `measure(target, drafter, inputs of the prompts, *given)` from a new process."""
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the new process inherits it: Ctrl-C is for this one
            try:
                found = pool.submit(self._load_and, measure, list(prompts), *given)
            finally:
                signal.signal(signal.SIGINT, before)
            try:
                return found.result()
            except KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.kill()
                raise

    def _load_and(self, measure: Callable[..., Found], prompts: Sequence[str], *given: Any) -> Found:
        from transformers.utils.logging import disable_progress_bar

        from ...generate.by_name import found_for_targets
        from ...runtime.target_loading import load_target

        disable_progress_bar()
        named = found_for_targets(self.drafter, self.dtype, self.device)
        target, tokenizer = load_target(self.target, self.dtype, self.device)
        drafter = named(target)
        if self.packed_weights is not None:
            drafter.generation_config.packed_weights = self.packed_weights
        return measure(target, drafter, [encode_prompt(tokenizer, prompt, self.device) for prompt in prompts], *given)


@dataclass(frozen=True)
class FirstCalls:
    """Seconds of the first calls that emit `new_tokens` tokens, plain and drafted."""

    new_tokens: int
    plain: list[float]
    drafted: list[float]

    @property
    def time_ratio(self) -> float:
        return statistics.median(self.drafted) / statistics.median(self.plain)


def run_first_calls(pair: Pair, prompt: str, lengths: Sequence[int], repeats: int) -> list[FirstCalls]:
    """Measures calls of each length, `repeats` plain and `repeats` drafted ones, each in a fresh process.

    Raises a ValueError if there is no length, or one is below 1.
    """
    valid, wanted = min(lengths, default=0) > 0, "expected numbers of at least 1, such as 8,32,128"
    demand(valid, "lengths", list(lengths), wanted)
    results = []
    for length in lengths:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(repeats):
            for drafted in (False, True) if repeat % 2 == 0 else (True, False):
                seconds[drafted].append(pair.in_fresh_process(time_first_call, [prompt], length, drafted))
        results.append(FirstCalls(length, seconds[False], seconds[True]))
    return results


def time_first_call(target: Any, drafter: Any, inputs: Sequence[Inputs], new_tokens: int, drafted: bool) -> float:
    """Returns the seconds of one greedy call, plain or drafted."""
    call = {**inputs[0], "do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return timed(target.device, target.generate, **call, assistant_model=drafter if drafted else None)[1]


def print_first_calls(results: Sequence[FirstCalls], console: Console) -> None:
    rows = ((str(row.new_tokens), _shown(row.plain), _shown(row.drafted), f"{row.time_ratio:.2f}") for row in results)
    console.print(figures_table(("new tokens", "plain s", "drafted s", "time"), rows))
    note(console, f"processor: {processor(torch.device('cpu'))}", FIRST_CALLS)


def _shown(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}..{max(seconds):.2f})"


@dataclass(frozen=True)
class ConcurrentCalls:
    """Measurements of concurrent calls."""

    calls: int
    packed: int  # calls that used packed weights
    before: int  # bytes of resident memory before the calls
    peak: int  # its peak while they ran

    @property
    def added(self) -> float:
        return (self.peak - self.before) / _MB


def run_concurrent(
    pair: Pair, prompts: Sequence[str], counts: Sequence[int], max_new_tokens: int
) -> list[ConcurrentCalls]:
    """Measures each number of concurrent calls in a fresh process; the calls take the prompts in turn.

    Raises a ValueError if a count is below 1, or the system does not report a process's peak memory.
    """
    demand(min(counts) > 0, "calls", min(counts), "expected numbers of at least 1")
    taken = [[prompts[index % len(prompts)] for index in range(count)] for count in counts]
    return [pair.in_fresh_process(measure_calls, each, max_new_tokens) for each in taken]


def measure_calls(target: Any, drafter: Any, inputs: Sequence[Inputs], max_new_tokens: int) -> ConcurrentCalls:
    """Makes one plain call, then decodes all inputs concurrently, each in a thread.

    Raises a ValueError if the system does not report a process's peak memory.
    """
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "do_sample": False}
    target.generate(**inputs[0], **settings)
    together = threading.Barrier(len(inputs))

    def call(each: Inputs) -> bool:
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
    rows = (
        (str(row.calls), f"{row.packed}/{row.calls}", f"{row.added:.0f}", f"{row.before / _MB:.0f}") for row in results
    )
    console.print(figures_table(("calls at once", "packed", "added MB", "MB before"), rows))
    note(console, CONCURRENT)
