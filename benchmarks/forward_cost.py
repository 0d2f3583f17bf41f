"""Milliseconds of a target's forward over trees of several sizes behind contexts of several lengths, by way.

    python benchmarks/forward_cost.py [--target T] [--rows 1,9,17,25] [--past 200] [--dtype bfloat16] [--only WAYS]

Each way but the last adds to the one before:

- plain: transformers' `DynamicCache`, which concatenates. Under a mask, grouped keys and values are repeated.
- growing: a cache that grows in place (`runtime/cache_slots.py`).
- grouped: keys are read once for all heads that share them (`cpu/grouped_attention.py`).
- few: by our own operator for few queries, where it runs (`cpu/few_queries.py`).
- packed: with packed copies of the weights (`cpu/packed_weights.py`).
- compiled: with compiled layers too, which the first run compiles (about a minute).
- products: the products of the way before alone, each called once with inputs of its size.

All ways read as many random tokens behind `--past` tokens, in changing order; the tables have medians. Among others a
compiled forward finds less in the processor's caches than among rounds: `--only compiled,products` times these alone.
Needs an idle machine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from runner import counts, loaded_target, names, numbers, options, print_by_rows

WAYS = ("plain", "growing", "grouped", "few", "packed")
_COMPILED = ("compiled", "products")
_CHUNK = 1024  # tokens of a context that are read at once


def filled(target: Any, past: int) -> Any:
    """Returns a cache of so many random tokens."""
    import torch
    from transformers import DynamicCache

    from hf_hsdraft.core.cache_name import CACHE

    cache = DynamicCache(config=target.config)
    for part in torch.randint(100, 1000, (1, past)).split(_CHUNK, dim=1):
        target(part.to(target.device), **{CACHE: cache}, logits_to_keep=1)
    return cache


def inputs_of(target: Any, past: int, rows: int) -> dict[str, Any]:
    """Returns the inputs of a forward over `rows` random tokens behind `past`: several under a mask, as a tree's."""
    import torch

    ids = torch.randint(100, 1000, (1, rows))
    seen = torch.ones(1, 1, rows, past + rows, dtype=torch.bool).tril(past)
    inputs = {"input_ids": ids, "position_ids": torch.arange(past, past + rows)[None]}
    inputs |= {"attention_mask": seen} if rows > 1 else {}
    return {name: each.to(target.device) for name, each in inputs.items()}


def readers(target: Any, past: int, rows: int) -> dict[str, Callable[[], float]]:
    """Returns for each of `WAYS` a function that reads the same tokens, drops them again, and returns milliseconds."""
    from hf_hsdraft.bench.calls import timed
    from hf_hsdraft.core.cache_name import CACHE
    from hf_hsdraft.cpu import grouped_attention
    from hf_hsdraft.cpu.packed_weights import PackedWeights, linears_to_pack
    from hf_hsdraft.cpu.small_weights import KERNEL
    from hf_hsdraft.runtime.cache_slots import make_room

    KERNEL.operators(wait=True)
    inputs, cache = inputs_of(target, past, rows), filled(target, past)
    growing, packed = copy.deepcopy(cache), PackedWeights(linears_to_pack(target, True))
    make_room(growing)

    def read(way: str) -> float:
        own = cache if way == "plain" else growing
        with ExitStack() as stack:
            if way in ("grouped", "few", "packed"):
                stack.enter_context(grouped_attention.grouped_attention(target.device))
            if way == "grouped":
                stack.enter_context(patch.object(grouped_attention, "attend_few", lambda *layer: None))
            if way == "packed":
                stack.enter_context(packed.in_use())
            _, seconds = timed(target.device, target, **inputs, **{CACHE: own})
        own.crop(-rows)
        return 1000 * seconds

    return {way: partial(read, way) for way in WAYS}


def compiled(target: Any, past: int, rows: int) -> dict[str, Callable[[], float]]:
    """Returns the same for packed weights and compiled layers, and for the products of these forwards."""
    import torch

    from hf_hsdraft.bench.calls import timed
    from hf_hsdraft.core.cache_name import CACHE
    from hf_hsdraft.cpu.packed_weights import joined_product, packed_now
    from hf_hsdraft.runtime.cache_slots import make_room
    from hf_hsdraft.runtime.target_runtime import Acceleration

    acceleration = Acceleration(target)
    acceleration.begin(True, 1000, True)
    inputs, cache = inputs_of(target, past, rows), filled(target, past)
    make_room(cache)

    def read() -> float:
        forward = partial(acceleration.forward, {**inputs, CACHE: cache}, comes_again=False)
        _, seconds = timed(target.device, forward)
        cache.crop(-rows)
        while acceleration.after_round():  # compiles and packs
            forward()
            cache.crop(-rows)
        return 1000 * seconds

    for _ in range(3):
        read()
    weights = acceleration._packing.weights
    with weights.in_use():
        groups = dict.fromkeys(weights._of[linear].linears for linear in packed_now(target))
    states = [torch.randn(1, rows, group[0].in_features, dtype=target.dtype) for group in groups]

    def multiply() -> float:
        with weights.in_use():
            return 1000 * timed(target.device, lambda: [*map(joined_product, groups, states)])[1]

    return {"compiled": read, "products": multiply}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, dtype="bfloat16", device="cpu", repeats=15, seed=0, json=None)
    parser.add_argument("--rows", type=counts, default=[1, 9, 17, 25], help="nodes, the root included; 1,9,17,25")
    parser.add_argument("--past", type=numbers, default=[200], help="tokens in the cache; default: 200")
    parser.add_argument("--only", type=names, default=[*WAYS, *_COMPILED], help="ways; default: all")
    given = parser.parse_args(arguments)
    import torch

    torch.manual_seed(given.seed)
    target, _ = loaded_target(given)

    def calls_of(rows: int) -> dict[str, Callable[[], float]]:
        found = dict[str, Callable[[], float]]()
        for past in given.past:
            calls = readers(target, past, rows) if set(given.only) & set(WAYS) else {}
            calls |= compiled(target, past, rows) if set(given.only) & set(_COMPILED) else {}
            found |= {f"{past}: {name}": calls[name] for name in given.only}
        return found

    with torch.no_grad():
        print_by_rows(given, calls_of, "context: way", "node")


if __name__ == "__main__":
    main()
