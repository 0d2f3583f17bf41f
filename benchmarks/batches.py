"""Times batches without a drafter, with one, and with a useless one, with which drafting soon rests.

    python benchmarks/batches.py --prompts spec_bench_dev.jsonl --json batches.json --batch-sizes 8 --dtypes bfloat16

It stops before a call that would exceed `--seconds`; the same command resumes. So the table can be measured in short
parts, and each run prints all of it.

- plain / ours: time of plain decoding over that with the drafter, for the same batch, in changing order; median and
  quartiles over all batches and repeats. Above 1 drafting gains.
- at rest: the same with a drafter whose weights are random.
- --one-thread: counts the processor time of one thread, so that other processes disturb less.
- rows as plain: rows with plain decoding's text. In bfloat16 texts may diverge at near-ties.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner import Decoded, counts, decoded, keep, loaded_target, names, options, print_table, prompt_texts

REST, ON = "at rest", "on"
COLUMNS = (
    "dtype",
    "batch",
    "drafting",
    "plain / ours",
    "quartiles",
    "pairs",
    "tokens a row and forward",
    "rows as plain",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__, target=None, drafter=None, prompts=None, max_new_tokens=36, repeats=8, seed=0, json=...)
    parser.add_argument("--batch-sizes", type=counts, default=[2, 4, 8, 16, 32], help="default: 2,4,8,16,32")
    parser.add_argument("--dtypes", type=names, default=["bfloat16", "float32"], help="default: bfloat16,float32")
    parser.add_argument("--longest", type=int, default=400, help="characters of a prompt; default: 400")
    parser.add_argument("--seconds", type=float, default=100.0, help="time of this run; default: 100")
    parser.add_argument("--one-thread", action="store_true", help="see above")
    given = parser.parse_args(arguments)
    given.drafter = given.drafter[0] if given.drafter else None
    ends = time.monotonic() + given.seconds
    cells = _kept(given.json)
    for dtype in given.dtypes:
        todo = [
            (size, kind)
            for size in given.batch_sizes
            for kind in (ON, REST)
            if len(cells.get(f"{dtype} {size} {kind}", [])) < given.repeats
        ]
        if not todo or time.monotonic() > ends:
            continue
        given.dtype = dtype
        pair = _Pair(given)
        for size, kind in todo:
            done = cells.setdefault(f"{dtype} {size} {kind}", [])
            for found in pair.timed(size, kind, len(done), ends):
                done.append(found)
                keep(given.json, {"cells": cells})
    print_table(COLUMNS, (_row(name, found) for name, found in sorted(cells.items(), key=_order) if found))
    return 0


class _Pair:
    """A target with its drafter, and one of the same shape whose weights are random."""

    def __init__(self, given: Any) -> None:
        import torch

        from hf_hsdraft.cli._shared import drafter_of
        from hf_hsdraft.generate.by_name import load_drafter

        self.given = given
        self._clock = time.perf_counter
        if given.one_thread:
            torch.set_num_threads(1)
            self._clock = time.thread_time
        self.target, self.tokenizer = loaded_target(given)
        name, dtype = drafter_of(given.target, given.drafter), getattr(torch, given.dtype)
        self.drafters = {kind: load_drafter(name, dtype) for kind in (ON, REST)}
        torch.manual_seed(given.seed)
        for weight in self.drafters[REST].parameters():
            weight.data.normal_(0.0, 0.02)

    def timed(self, size: int, kind: str, begin: int, ends: float) -> Iterator[dict[str, Any]]:
        """Yields pairs of calls from number `begin` on, until there are enough or the time is over."""
        batches = self._batches(size)
        for _ in range(2):  # packs weights, and learns what a forward costs
            self._call(batches[0], self.drafters[kind])
        for number in range(begin, self.given.repeats):
            before = time.monotonic()
            batch, found = batches[number % len(batches)], {}
            for drafter in (None, self.drafters[kind])[:: -1 if number % 2 else 1]:
                found["plain" if drafter is None else "ours"] = self._call(batch, drafter)
            plain, ours = found["plain"], found["ours"]
            yield {
                "ratio": plain.seconds / ours.seconds,
                "tau": ours.statistics.tau,
                "same": sum(one == other for one, other in zip(plain.texts, ours.texts, strict=True)),
                "rows": size,
            }
            if 2 * time.monotonic() - before > ends:
                return

    def _batches(self, size: int) -> list[Any]:
        """Batches of prompts of similar length."""
        from hf_hsdraft.bench.run import padded_batches

        texts = [text for text in prompt_texts(self.given) if len(text) <= self.given.longest]
        return [each for each in padded_batches(self.tokenizer, texts, size, "cpu") if len(each["input_ids"]) == size]

    def _call(self, batch: Any, drafter: Any, most: int = 0) -> Decoded:
        import torch

        with torch.inference_mode():
            return decoded(self.target, batch, most or self.given.max_new_tokens, drafter, self._clock)


def _kept(path: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads(path.read_text())["cells"] if path.exists() else {}


def _order(cell: tuple[str, Any]) -> tuple[str, int, str]:
    dtype, size, kind = cell[0].split(" ", 2)
    return dtype, int(size), kind


def _row(name: str, found: Sequence[dict[str, Any]]) -> Sequence[Any]:
    dtype, size, kind = name.split(" ", 2)
    ratios = [each["ratio"] for each in found]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    same, rows = sum(each["same"] for each in found), sum(each["rows"] for each in found)
    tau = statistics.mean(each["tau"] for each in found)
    return dtype, size, kind, middle, f"{low:.2f} to {high:.2f}", len(found), tau, f"{same} of {rows}"


if __name__ == "__main__":
    sys.exit(main())
