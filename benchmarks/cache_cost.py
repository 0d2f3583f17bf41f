"""Measures what verification costs over a long context, with and without our caches, attention and packed weights.

    python benchmarks/cache_cost.py --context-lengths 256,2048,8192

It times forwards over one token, and over a chain of drafted tokens under an explicit mask, in five ways:

- plain: transformers' `DynamicCache`, which concatenates. Under a mask, grouped keys and values are repeated.
- growing: a cache that grows in place (`runtime/cache_slots.py`).
- grouped: the same cache, and keys are read once for all heads that share them (`grouped_attention.py`).
- few: the same, with our own operator for few queries, where it runs (`few_queries.py`).
- packed: the same, with packed copies of the weights (`packed_weights.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from runner import in_turns, keep, loaded_target, numbers, options, print_table

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import DynamicCache

WAYS = ("plain", "growing", "grouped", "few", "packed")
_CHUNK = 1024  # number of tokens of the context read at once


def measure(target: Any, context: int, nodes: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Returns for each way the median milliseconds of a forward over one token and over `nodes` tokens."""
    from hf_hsdraft.cpu import grouped_attention
    from hf_hsdraft.cpu.packed_weights import PackedWeights, linears_to_pack
    from hf_hsdraft.cpu.small_weights import KERNEL
    from hf_hsdraft.runtime.cache_slots import make_room

    KERNEL.operators(wait=True)

    cache = _filled(target, context)
    growing = copy.deepcopy(cache)
    make_room(growing)
    packed = PackedWeights(linears_to_pack(target, True))

    def forward(way: str, size: int) -> float:
        with ExitStack() as stack:
            if way in ("grouped", "few", "packed"):
                stack.enter_context(grouped_attention.grouped_attention(target.device))
            if way == "grouped":
                stack.enter_context(patch.object(grouped_attention, "attend_few", lambda *layer: None))
            if way == "packed":
                stack.enter_context(packed.in_use())
            return _forward(target, cache if way == "plain" else growing, context, size)

    ways = {(way, size): partial(forward, way, size) for way in WAYS for size in (1, nodes)}
    seconds = in_turns(ways, repeats, warm_up=2)
    one, many = ({way: 1e3 * median(seconds[way, size]) for way in WAYS} for size in (1, nodes))
    return {way: (one[way], many[way]) for way in WAYS}


def _filled(target: Any, context: int) -> DynamicCache:
    import torch
    from transformers.cache_utils import DynamicCache

    from hf_hsdraft.core.cache_name import CACHE

    cache = DynamicCache(config=target.config)
    with torch.inference_mode():
        for part in _tokens(target, context).split(_CHUNK, dim=1):
            target(part, **{CACHE: cache}, logits_to_keep=1)
    return cache


def _forward(target: Any, cache: DynamicCache, context: int, size: int) -> float:
    """Returns the seconds of a forward, after which the cache is as before."""
    import torch

    from hf_hsdraft.bench.calls import timed
    from hf_hsdraft.core.cache_name import CACHE

    kwargs: dict[str, Any] = {}
    if size > 1:  # with a mask, as for a draft tree
        own = torch.ones(size, size, dtype=torch.bool).tril()
        seen = torch.cat([torch.ones(size, context, dtype=torch.bool), own], dim=1)
        mask = torch.zeros_like(seen, dtype=target.dtype).masked_fill_(~seen, float("-inf"))
        kwargs["attention_mask"] = mask[None, None].to(target.device)
        kwargs["position_ids"] = torch.arange(context, context + size, device=target.device)[None]
    with torch.inference_mode():
        _, seconds = timed(target.device, target, _tokens(target, size), **{CACHE: cache}, **kwargs)
        cache.crop(-size)
    return seconds


def _tokens(target: Any, count: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.config.get_text_config().vocab_size, (1, count), generator=generator).to(target.device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, target=None, repeats=15, dtype="bfloat16", device="cpu", json=None)
    parser.add_argument("--context-lengths", type=numbers, default=[256, 2048, 8192], help="tokens in the cache")
    parser.add_argument("--nodes", type=int, default=25, help="nodes of the draft, the root included")
    given = parser.parse_args(arguments)
    model, _ = loaded_target(given)
    rows = {length: measure(model, length, given.nodes, given.repeats) for length in given.context_lengths}
    columns = ("tokens", "way", "one token, ms", f"{given.nodes} tokens, ms")
    print_table(columns, ([length, way, *times] for length, row in rows.items() for way, times in row.items()))
    keep(given.json, {"nodes": given.nodes, "dtype": given.dtype, "milliseconds": rows})


if __name__ == "__main__":
    main()
