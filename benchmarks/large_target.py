"""Measures time and memory of each family's drafters for a large target, by one of the same width with few layers.

    python benchmarks/large_target.py                      # the shape of Qwen3-8B, in bfloat16
    python benchmarks/large_target.py --depths 1,2 --tiny --dtype float32

All weights are random, since neither time nor memory depends on their values. The target is measured with two small
numbers of layers, from which its time with all of them is extrapolated.

- own MB: weights of the drafter itself, in 10^6 bytes.
- borrowed MB: weights of the target that it multiplies by, which take no additional memory.
- added MB: growth of the resident memory while the drafter is built and used.
- draft: median time of a draft of one text, after a round that accepted two tokens.
- step, verify: median times of the target's forward over one token and over a tree, for all layers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runner import dtype_of, numbers, options, print_table

if TYPE_CHECKING:
    import torch

    from hf_hsdraft.drafters.base.protocol import Accepted, Drafter


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
    """What a drafter takes. Memory is in bytes, times are in seconds."""

    family: str
    own: int  # its own weights
    borrowed: int  # the target's weights that it multiplies by
    added: int | None  # growth of the resident memory at most; `None` where the system does not tell
    draft: float  # median time of a draft

    def cells(self, step: float) -> list[Any]:
        """Returns a row of the table, beside the seconds of the target's step."""
        sizes = (None if size is None else f"{size / 1e6:,.0f}" for size in (self.own, self.borrowed, self.added))
        return [self.family, *sizes, f"{1e3 * self.draft:.0f}", f"{self.draft / step:.3f}"]


def random_target(shape: Shape, layers: int, dtype: torch.dtype) -> Any:
    """Returns a target with random weights and some of the layers that its shape has."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    fields = {**asdict(shape), "num_hidden_layers": layers}
    config = Qwen3Config(**fields, eos_token_id=None, tie_word_embeddings=False)
    with _default_dtype(dtype):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made in this dtype. Made in float32 and then cast they would take memory twice."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure_drafter(family: str, target: Any, nodes: int) -> Taken:
    """Measures what a drafter of a family takes beside a target, with drafts of `nodes` nodes besides the root."""
    import torch

    from hf_hsdraft.bench.machine import PeakMemory
    from hf_hsdraft.training.families.trainable import TRAINABLE

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
    import torch

    from hf_hsdraft.drafters.base.draft_options import DraftOptions
    from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call

    width, beam = target.config.hidden_size * len(drafter.taps), drafter.generation_config.beam_width

    def news(begin: int, count: int) -> Accepted:
        taps, places = torch.randn(count, width).to(target.dtype), torch.arange(begin, begin + count)
        following = torch.randint(target.config.vocab_size, (count,))
        return Accepted(0, following[-3:].tolist(), taps, places, following)

    session = drafter.session(Call(target, 1, DraftOptions.of(drafter)))
    accepted, times, position = news(0, _PROMPT), [], _PROMPT
    for _ in range(_REPEATS + 1):
        session.observe([accepted])
        begin = time.perf_counter()
        session.draft([Ask(0, accepted.tokens[-1], drafter.num_draft_steps, nodes, beam)])
        times.append(time.perf_counter() - begin)
        accepted, position = news(position, 3), position + 3
    return times[1:]  # the first one reads the prompt


def forward_time(target: Any, rows: int) -> float:
    """Returns the median seconds of the target's forward over some tokens after a prompt."""
    import torch

    from hf_hsdraft.bench.machine import timed
    from hf_hsdraft.core.cache_name import CACHE, returned_cache

    prompt, times = torch.randint(target.config.vocab_size, (1, _PROMPT)), []
    with torch.inference_mode():
        cache = returned_cache(target(prompt, use_cache=True, logits_to_keep=1))
        for _ in range(_REPEATS):
            ids = torch.randint(target.config.vocab_size, (1, rows))
            times.append(timed(target.device, target, ids, **{CACHE: cache})[1])
            cache.crop(-rows)
    return statistics.median(times)


def at_full_depth(times: tuple[float, float], layers: tuple[int, int], all_layers: int) -> float:
    """Returns the time with all layers, by the times with two smaller numbers of layers."""
    each = (times[1] - times[0]) / (layers[1] - layers[0])
    return times[0] + each * (all_layers - layers[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, dtype="bfloat16")
    parser.add_argument("--depths", type=numbers, default=[2, 4], help="two numbers of layers to measure")
    parser.add_argument("--nodes", type=int, default=24, help="nodes of a tree, without the root")
    parser.add_argument("--tiny", action="store_true", help="a small target, to try the command")
    given = parser.parse_args(arguments)
    shape, (few, more), tree = TINY if given.tiny else Shape(), given.depths, given.nodes + 1
    import torch

    from hf_hsdraft.bench.machine import processor
    from hf_hsdraft.training.families.trainable import TRAINABLE

    times: dict[int, list[float]] = {1: [], tree: []}
    rows: list[Taken] = []
    for layers in (few, more):
        target = random_target(shape, layers, dtype_of(given))
        for count, found in times.items():
            found.append(forward_time(target, count))
        if layers == more:
            rows = [measure_drafter(family, target, given.nodes) for family in TRAINABLE]
        del target
    print(f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads, {given.dtype}, {shape}")
    whole = shape.num_hidden_layers
    step, verify = (at_full_depth((one, other), (few, more), whole) for one, other in times.values())
    print(f"target, all {whole} layers: step {1e3 * step:.0f} ms, verify {1e3 * verify:.0f} ms\n")
    columns = ("family", "own MB", "borrowed MB", "added MB", "draft, ms", "draft in steps")
    print_table(columns, (row.cells(step) for row in rows))


if __name__ == "__main__":
    main()
