"""Measures what drafters of each family take beside a large target, by a target of the same width and few layers.

    python -m hf_hsdraft.bench.large_target                      # the shape of Qwen3-8B, in bfloat16
    python -m hf_hsdraft.bench.large_target --depths 1,2 --tiny --dtype float32

All weights are random: neither time nor memory depends on their values. The target is measured with two small numbers
of layers, and its time with all of them follows from the two.

- own MB: weights of the drafter itself, in 10^6 bytes.
- borrowed MB: weights of the target that it multiplies by, which take no memory of their own.
- added MB: by how much the resident memory grows while the drafter is built and used.
- draft: median time of a draft of one text, after a round that accepted two tokens.
- step, verify: median times of the target's forward over one token and over a tree, for all layers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from ..core.cache_name import CACHE, returned_cache
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Accepted, Ask, DraftCall, Drafter
from ..training.families.trainable import TRAINABLE
from .machine import PeakMemory, processor


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, by the names of `Qwen3Config`. The defaults are those of Qwen3-8B."""

    hidden_size: int = 4096
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    vocab_size: int = 151936


TINY = Shape(64, 6, 4, 2, 16, 128, 512)
_REPEATS, _PROMPT = 5, 256


@dataclass(frozen=True)
class Taken:
    """What a drafter takes. Memory is in bytes, times are in seconds.

    Attributes:
        family: family of the drafter.
        own: bytes of its own weights.
        borrowed: bytes of the target's weights that it multiplies by.
        added: bytes by which the resident memory grew at most; `None` where the system does not tell.
        draft: median time of a draft.
    """

    family: str
    own: int
    borrowed: int
    added: int | None
    draft: float


def random_target(shape: Shape, layers: int, dtype: torch.dtype) -> Any:
    """Returns a target with random weights and some of the layers that its shape has."""
    fields = {**asdict(shape), "num_hidden_layers": layers}
    config = Qwen3Config(**fields, eos_token_id=None, tie_word_embeddings=False)
    with _default_dtype(dtype):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made in this dtype. Made in float32 and then cast they would take memory twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure_drafter(family: str, target: Any, nodes: int) -> Taken:
    """Measures what a drafter of a family takes beside a target.

    Args:
        family: name of a family that can be trained.
        target: the target.
        nodes: number of nodes of a draft besides the root.
    """
    memory = PeakMemory(target.device)
    before = memory.start()
    kind = TRAINABLE[family]
    with _default_dtype(target.dtype):
        drafter = kind.untrained(target, {"draft_vocab_size": target.config.vocab_size}).eval()
    drafter.generation_config.tree_size = nodes
    with torch.inference_mode():
        seconds = statistics.median(_draft_times(drafter, target, nodes))
    added = None if before is None else (memory.peak() or before) - before
    size = target.dtype.itemsize
    reads = drafter.reads(drafter.num_draft_steps, drafter.generation_config.beam_width)
    borrowed = sum(read.weights for read in reads if read.borrowed)
    own = sum(parameter.nbytes for parameter in drafter.parameters())
    return Taken(family, own, borrowed * size, added, seconds)


def _draft_times(drafter: Drafter, target: Any, nodes: int) -> list[float]:
    """Returns the seconds of some drafts, each after a round that accepted two tokens."""
    width = target.config.hidden_size * len(drafter.taps)

    def news(begin: int, count: int) -> Accepted:
        taps, places = torch.randn(count, width).to(target.dtype), torch.arange(begin, begin + count)
        following = torch.randint(target.config.vocab_size, (count,))
        return Accepted(0, following[-3:].tolist(), taps, places, following)

    session = drafter.session(DraftCall(target, 1, DraftOptions.of(drafter)))
    accepted, times, position = news(0, _PROMPT), [], _PROMPT
    for _ in range(_REPEATS + 1):
        session.observe([accepted])
        begin = time.perf_counter()
        width = drafter.generation_config.beam_width
        session.draft([Ask(0, accepted.tokens[-1], drafter.num_draft_steps, nodes, width)])
        times.append(time.perf_counter() - begin)
        accepted, position = news(position, 3), position + 3
    return times[1:]  # the first one reads the prompt


@torch.inference_mode()
def forward_time(target: Any, rows: int) -> float:
    """Returns the median seconds of the target's forward over some tokens after a prompt."""
    prompt = torch.randint(target.config.vocab_size, (1, _PROMPT))
    cache = returned_cache(target(prompt, use_cache=True, logits_to_keep=1))
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        target(torch.randint(target.config.vocab_size, (1, rows)), **{CACHE: cache})
        times.append(time.perf_counter() - begin)
        cache.crop(-rows)
    return statistics.median(times)


def at_full_depth(times: tuple[float, float], layers: tuple[int, int], all_layers: int) -> float:
    """Returns the time with all layers, by the times with two smaller numbers of layers."""
    each = (times[1] - times[0]) / (layers[1] - layers[0])
    return times[0] + each * (all_layers - layers[0])


def main(
    depths: Annotated[str, typer.Option(help="Two numbers of layers that are measured.")] = "2,4",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a tree besides the root.")] = 24,
    tiny: Annotated[bool, typer.Option(help="A small target, to try the command.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Prints what drafters of each family take beside a large target."""
    shape, kind = TINY if tiny else Shape(), getattr(torch, dtype)
    few, more = (int(part) for part in depths.split(","))
    console, times = Console(), dict[int, list[float]]()
    rows: list[Taken] = []
    for layers in (few, more):
        target = random_target(shape, layers, kind)
        for count in (1, nodes + 1):
            times.setdefault(count, []).append(forward_time(target, count))
        if layers == more:
            rows = [measure_drafter(family, target, nodes) for family in TRAINABLE]
        del target
    console.print(f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads, {dtype}, {shape}")
    whole = {
        count: at_full_depth((both[0], both[1]), (few, more), shape.num_hidden_layers) for count, both in times.items()
    }
    step, verify = whole[1], whole[nodes + 1]
    console.print(
        f"target, all {shape.num_hidden_layers} layers: step {1e3 * step:.0f} ms, verify {1e3 * verify:.0f} ms"
    )
    table = Table()
    for column in ("family", "own MB", "borrowed MB", "added MB", "draft, ms", "draft in steps"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for row in rows:
        added = "-" if row.added is None else f"{row.added / 1e6:,.0f}"
        sizes = (f"{row.own / 1e6:,.0f}", f"{row.borrowed / 1e6:,.0f}", added)
        table.add_row(row.family, *sizes, f"{1e3 * row.draft:.0f}", f"{row.draft / step:.3f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
