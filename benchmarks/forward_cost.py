"""Milliseconds of a target's forward over trees of several sizes, and of its products alone, in one table.

    python benchmarks/forward_cost.py [--target T] [--rows 1,9,17,25] [--past 200] [--dtype bfloat16]

Forwards run as in transformers, with packed weights, and with packed weights and compiled layers, which the first run
compiles (about a minute). The products are those of the last way, each called once with inputs of its size. All ways
read the same random tokens behind `--past` tokens, in changing order; the table has medians. Needs an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from runner import counts, loaded_target, options, print_by_rows


def accelerated(target: Any, packed: bool, programs: bool) -> Any:
    from hf_hsdraft.runtime.target_runtime import Acceleration

    acceleration = Acceleration(target)
    acceleration.begin(packed, 1000, programs)
    return acceleration


def reader(target: Any, acceleration: Any, ids: Any, past: int) -> Callable[[], float]:
    """Returns a function that reads `ids` `[1, n]` under a tree's mask, drops them again, and returns milliseconds."""
    import torch
    from transformers import DynamicCache

    from hf_hsdraft.core.cache_name import CACHE
    from hf_hsdraft.runtime.cache_slots import make_room

    cache, count = DynamicCache(config=target.config), ids.shape[1]
    target(torch.arange(1, past + 1)[None], **{CACHE: cache})
    make_room(cache)
    places = torch.arange(past, past + count)[None]
    seen = torch.ones(1, 1, count, past + count, dtype=torch.bool).tril(past)
    inputs = {"input_ids": ids, "position_ids": places, "attention_mask": seen if count > 1 else None}

    def read() -> float:
        begin = time.perf_counter()
        acceleration.forward({**inputs, CACHE: cache}, comes_again=False)
        milliseconds = 1000 * (time.perf_counter() - begin)
        cache.crop(-count)
        while acceleration.after_round():  # compiles and packs
            acceleration.forward({**inputs, CACHE: cache}, comes_again=False)
            cache.crop(-count)
        return milliseconds

    for _ in range(3):
        read()
    return read


def products(target: Any, acceleration: Any, rows: int) -> Callable[[], float]:
    """Returns a function that calls the products of a forward, and returns milliseconds."""
    import torch

    from hf_hsdraft.cpu.packed_weights import joined_product, packed_now

    weights = acceleration._packing.weights
    with weights.in_use():
        groups = dict.fromkeys(weights._of[linear].linears for linear in packed_now(target))
    inputs = [torch.randn(1, rows, group[0].in_features, dtype=target.dtype) for group in groups]

    def multiply() -> float:
        with weights.in_use():
            begin = time.perf_counter()
            for group, x in zip(groups, inputs, strict=True):
                joined_product(group, x)
            return 1000 * (time.perf_counter() - begin)

    return multiply


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, dtype="bfloat16", repeats=15, seed=0, json=None)
    parser.add_argument("--rows", type=counts, default=[1, 9, 17, 25], help="default: 1,9,17,25")
    parser.add_argument("--past", type=int, default=200, help="tokens in the cache; default: 200")
    given = parser.parse_args(arguments)
    import torch

    torch.manual_seed(given.seed)
    target, _ = loaded_target(given)
    kinds = {"eager": (False, False), "packed": (True, False), "packed, compiled": (True, True)}

    def calls_of(rows: int) -> dict[str, Callable[[], float]]:
        ids, calls = torch.randint(100, 1000, (1, rows)), dict[str, Callable[[], float]]()
        for name, kind in kinds.items():
            acceleration = accelerated(target, *kind)
            calls[name] = reader(target, acceleration, ids, given.past)
            if kind == (True, True):
                calls["its products"] = products(target, acceleration, rows)
        return calls

    with torch.no_grad():
        print_by_rows(given, calls_of, "forward", "node")


if __name__ == "__main__":
    main()
