"""Measurements in fresh processes: the first call of a process, and the memory of concurrent calls.

    python benchmarks/processes.py --lengths 8,32,128     # seconds of the first call, plain and with the drafter
    python benchmarks/processes.py --calls 1,2,4,8        # memory of concurrent calls; Linux only

Every process loads target and drafter by name, measures once, and ends. No earlier call has prepared anything for it.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner import counts, dtype_of, keep, options, print_table, prompt_texts

if TYPE_CHECKING:
    from hf_hsdraft.methods.cold_calls import Pair

FIRST_CALLS = (
    "plain s, drafted s: seconds of the first generate() of a process, without loading target and drafter; plain and "
    "drafted calls take turns, each in a fresh process, and every text has exactly so many new tokens; median, with "
    "least and greatest in brackets. time: the drafted median over the plain one; below 1 is quicker."
)
CONCURRENT = (
    "packed: number of calls that used packed weights, at least in their later rounds. added MB: peak of resident "
    "memory while the calls run, less MB before, the memory held after loading and one plain call."
)


def first_calls(pair: Pair, prompt: str, length: int, repeats: int) -> dict[bool, list[float]]:
    """Returns seconds of first calls of `length` tokens, plain (False) and drafted, each in a fresh process."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats):
        for drafted in (False, True) if repeat % 2 == 0 else (True, False):
            seconds[drafted].append(pair.in_fresh_process(time_first_call, [prompt], length, drafted))
    return seconds


def time_first_call(target: Any, drafter: Any, inputs: Sequence[Any], new_tokens: int, drafted: bool) -> float:
    """Returns the seconds of one greedy call, plain or drafted."""
    from hf_hsdraft.bench.calls import timed

    call = {**inputs[0], "do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return timed(target.device, target.generate, **call, assistant_model=drafter if drafted else None)[1]


@dataclass(frozen=True)
class ConcurrentCalls:
    """Measurements of concurrent calls."""

    calls: int
    packed: int  # calls that used packed weights
    before: int  # bytes of resident memory before the calls
    added: int  # bytes that the peak of it while they ran is above that


def measure_calls(target: Any, drafter: Any, inputs: Sequence[Any], max_new_tokens: int) -> ConcurrentCalls:
    """Makes one plain call, then decodes all inputs concurrently, each in a thread.

    Raises a ValueError if the system does not report a process's peak memory.
    """
    from hf_hsdraft.bench.calls import PeakMemory

    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "do_sample": False}
    target.generate(**inputs[0], **settings)
    together = threading.Barrier(len(inputs))

    def call(each: Any) -> bool:
        together.wait()
        output = target.generate(**each, **settings, assistant_model=drafter, return_dict_in_generate=True)
        return output.statistics.packed_weights

    memory = PeakMemory(target.device)
    before = memory.start()
    with ThreadPoolExecutor(len(inputs)) as threads:
        packed = sum(threads.map(call, inputs))
    peak = memory.peak()
    if before is None or peak is None:
        raise ValueError("this system does not tell the peak of a process's memory: measure on Linux")
    return ConcurrentCalls(len(inputs), packed, before, peak - before)


def main(argv: Sequence[str] | None = None) -> None:
    shared: dict[str, Any] = {"target": None, "drafter": None, "prompts": None, "max_new_tokens": 128, "repeats": 3}
    parser = options(__doc__, **shared, dtype="float32", device="cpu", json=None)
    parser.add_argument("--lengths", type=counts, default=[], help="numbers of new tokens of first calls")
    parser.add_argument("--calls", type=counts, default=[], help="numbers of concurrent calls")
    parser.add_argument("--packed-weights", choices=("true", "false"), help="default: the drafter's setting")
    given = parser.parse_args(argv)
    from hf_hsdraft.methods.cold_calls import Pair
    from hf_hsdraft.runtime.target_loading import default_drafter

    [drafter] = given.drafter or [default_drafter(given.target) or "ngrams"]
    packed = None if given.packed_weights is None else given.packed_weights == "true"
    pair, prompts = Pair(given.target, drafter, dtype_of(given), given.device, packed), prompt_texts(given)
    found = {length: first_calls(pair, prompts[0], length, given.repeats) for length in given.lengths}
    if found:
        print_table(("new tokens", "plain s", "drafted s", "time"), (_first_row(*each) for each in found.items()))
        print(FIRST_CALLS)
    taken = [[prompts[index % len(prompts)] for index in range(count)] for count in given.calls]
    memory = [pair.in_fresh_process(measure_calls, each, given.max_new_tokens) for each in taken]
    if memory:
        rows = ((each.calls, each.packed, each.added / 1e6, each.before / 1e6) for each in memory)
        print_table(("calls at once", "packed", "added MB", "MB before"), rows)
        print(CONCURRENT)
    keep(given.json, {"first_calls": found, "concurrent": [vars(each) for each in memory]})


def _first_row(length: int, seconds: dict[bool, list[float]]) -> tuple[Any, ...]:
    plain, drafted = seconds[False], seconds[True]
    shown = (f"{statistics.median(each):.2f} ({min(each):.2f}..{max(each):.2f})" for each in (plain, drafted))
    return length, *shown, statistics.median(drafted) / statistics.median(plain)


if __name__ == "__main__":
    sys.exit(main())
