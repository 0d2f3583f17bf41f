"""Measures what verification costs over a long context, with and without our caches, attention and packed weights.

    python -m hf_hsdraft.bench.cache_cost --context-lengths 256,2048,8192

It times forwards over one token, and over a chain of drafted tokens under an explicit mask. There are four ways:

- plain: transformers' `DynamicCache`, which concatenates. Under a mask, grouped keys and values are repeated.
- growing: a cache that grows in place (`cache_slots.py`).
- grouped: the same cache, and keys are read once for all heads that share them (`grouped_attention.py`).
- packed: as grouped, with packed copies of the weights (`packed_weights.py`).
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers.cache_utils import DynamicCache

from ..core.cache_name import CACHE
from ..cpu.grouped_attention import grouped_attention
from ..cpu.packed_weights import PackedWeights, linears_to_pack
from ..runtime.cache_slots import make_room
from ..runtime.target_loading import load_target
from ..training.files import write_json
from .machine import synchronise

WAYS = ("plain", "growing", "grouped", "packed")
_CHUNK = 1024  # number of tokens of the context read at once


def measure(target: Any, context: int, nodes: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns for each way the median milliseconds of a forward over one token and over `nodes` tokens.

    The ways take turns.
    """
    cache = _filled(target, context)
    growing = copy.deepcopy(cache)
    make_room(growing)
    caches = dict(zip(WAYS, (cache, growing, growing, growing), strict=True))
    packed = PackedWeights(linears_to_pack(target, True))
    times: dict[str, dict[str, list[float]]] = {way: {"one": [], "nodes": []} for way in WAYS}
    for repeat in range(repeats + 2):  # the first two are warm-up
        for way in WAYS:
            for name, size in (("one", 1), ("nodes", nodes)):
                with ExitStack() as stack:
                    if way in ("grouped", "packed"):
                        stack.enter_context(grouped_attention(target.device))
                    if way == "packed":
                        stack.enter_context(packed.in_use())
                    seconds = _forward(target, caches[way], context, size)
                if repeat > 1:
                    times[way][name].append(1e3 * seconds)
    return {way: {name: median(values) for name, values in row.items()} for way, row in times.items()}


@torch.inference_mode()
def _filled(target: Any, context: int) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    tokens = _tokens(target, context)
    for begin in range(0, context, _CHUNK):
        target(tokens[:, begin : begin + _CHUNK], **{CACHE: cache}, logits_to_keep=1)
    return cache


@torch.inference_mode()
def _forward(target: Any, cache: DynamicCache, context: int, size: int) -> float:
    kwargs: dict[str, Any] = {}
    if size > 1:  # with a mask, as for a draft tree
        own = torch.ones(size, size, dtype=torch.bool).tril()
        seen = torch.cat([torch.ones(size, context, dtype=torch.bool), own], dim=1)
        mask = torch.zeros_like(seen, dtype=target.dtype).masked_fill_(~seen, float("-inf"))
        kwargs["attention_mask"] = mask[None, None].to(target.device)
        kwargs["position_ids"] = torch.arange(context, context + size, device=target.device)[None]
    tokens = _tokens(target, size)
    synchronise(target.device)
    begin = time.perf_counter()
    target(tokens, **{CACHE: cache}, **kwargs)
    synchronise(target.device)
    seconds = time.perf_counter() - begin
    cache.crop(-size)
    return seconds


def _tokens(target: Any, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.config.get_text_config().vocab_size, (1, count), generator=generator).to(target.device)


def main(
    context_lengths: Annotated[str, typer.Option(help="Tokens in the cache.")] = "256,2048,8192",
    nodes: Annotated[int, typer.Option(min=2, help="Number of nodes of the draft, the root included.")] = 25,
    repeats: Annotated[int, typer.Option(min=1)] = 15,
    target: Annotated[str | None, typer.Option(help="Hub name, folder or .gguf file.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    device: Annotated[str, typer.Option()] = "cpu",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Times forwards on a real target."""
    lengths = [int(length) for length in context_lengths.split(",")]
    model, _ = load_target(target, getattr(torch, dtype), device)
    rows = {length: measure(model, length, nodes, repeats) for length in lengths}
    for length, row in rows.items():
        for way, times in row.items():
            typer.echo(
                f"{length:6d} tokens, {way:8s} one token {times['one']:7.1f} ms, {nodes} {times['nodes']:7.1f} ms"
            )
    if out is not None:
        write_json(out, {"nodes": nodes, "dtype": dtype, "milliseconds": rows})


if __name__ == "__main__":
    typer.run(main)
