"""Counts and times the parts of a round, and a step of plain decoding.

    python benchmarks/round_cost.py                                  # SmolLM2-135M-Instruct
    python benchmarks/round_cost.py --targets gemma-3-270m.gguf      # Hub names, folders, .gguf files
    python benchmarks/round_cost.py --tiny                           # whether it runs, in seconds

Operators are those that the profiler sees dispatched by Python or by compiled code, but not by other operators. Layers
are not compiled here, because operators inside a program cannot be counted. Rounds draft trees of a fixed size, as
deep as the drafter can. A round's parts are its draft, the verification, and the rest: commit, news, and bookkeeping.
"Beyond a step" is what a whole round runs more than a plain step.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from runner import counts, dtype_of, keep, names, options, print_table

if TYPE_CHECKING:
    import torch

PARTS = ("draft", "verify", "rest")
_STEP, _END, _SKIPPED = "step", "", 3  # the first rounds pack weights and try the target
_TOKENS = 30


@dataclass(frozen=True)
class Cost:
    """A step of plain decoding, or a part of a round: medians of operators, lower quartiles of seconds."""

    operators: float
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operators + other.operators, self.seconds + other.seconds)


def watched(target: Any, inputs: Mapping[str, Any], drafter: Any, note: Callable[[str], None], tokens: int) -> None:
    """Decodes; `note` gets each part's name when it begins."""
    from transformers import LogitsProcessorList
    from transformers.generation.streamers import BaseStreamer

    from hf_hsdraft.engine.loop import Observer

    def begin_step(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        note(_STEP)
        return scores

    class Rounds(Observer, BaseStreamer):
        began = staticmethod(functools.partial(note, "draft"))
        drafted = staticmethod(functools.partial(note, "verify"))
        verified = staticmethod(functools.partial(note, "rest"))

        def put(self, value: Any) -> None:
            pass

        def end(self) -> None:
            note(_END)

    kwargs = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None}
    if drafter is None:
        target.generate(**inputs, **kwargs, logits_processor=LogitsProcessorList([begin_step]))
        note(_END)
    else:
        target.generate(**inputs, **kwargs, assistant_model=drafter, streamer=Rounds())


def cost_of(target: Any, inputs: Mapping[str, Any], drafter: Any = None) -> dict[str, Cost]:
    """Counts and times the parts of a round, or with no drafter a step. Other programs disturb the slower times."""
    import torch
    from gpu_bench.counts import dispatched, traced

    decode = functools.partial(watched, target, inputs, drafter)
    decode(lambda part: None, 2 * _TOKENS)
    clock: list[tuple[str, float]] = []
    decode(lambda part: clock.append((part, time.perf_counter())), 2 * _TOKENS)
    spans = ((part, after - begin) for (part, begin), (_, after) in itertools.pairwise(clock))
    seconds = _typical(spans, lambda times: sorted(times)[len(times) // 4])

    def mark(part: str) -> None:
        with torch.profiler.record_function(f"part {part}"):
            pass

    events = traced(lambda: decode(mark, _TOKENS), target.device)
    marks = sorted((event["ts"], event["name"][5:]) for event in events if str(event.get("name")).startswith("part "))
    begun = dispatched(event for event in events if not str(event.get("name")).startswith("part "))
    operators = _typical(
        (part, sum(begin <= each < after for each in begun)) for (begin, part), (after, _) in itertools.pairwise(marks)
    )
    return {part: Cost(operators[part], seconds[part]) for part in seconds}


def _typical(found: Any, of: Callable[[list[float]], float] = median) -> dict[str, float]:
    """Typical numbers by part, without the first and the last rounds, which differ from the others."""
    by_part: dict[str, list[float]] = defaultdict(list)
    for part, number in found:
        by_part[part].append(number)
    return {part: of(numbers[_SKIPPED:-1] or numbers) for part, numbers in by_part.items() if part != _END}


def costs_of(target: Any, inputs: Any, drafters: Mapping[str, Any]) -> dict[str, Cost]:
    """Costs of a plain step, and of rounds and their parts, by the name of each drafter."""
    found = {"plain step": cost_of(target, inputs)[_STEP]}
    for name, drafter in drafters.items():
        parts = cost_of(target, inputs, drafter)
        found |= {f"{part}, {name}": parts[part] for part in PARTS}
        found[f"round, {name}"] = sum((parts[part] for part in PARTS), Cost(0.0, 0.0))
    return found


def drafters_of(drafter: Any, rows: Sequence[int], packed: bool) -> Iterator[tuple[str, Any]]:
    """Drafters of trees of fixed sizes, whose forwards read so many rows."""
    from gpu_bench.targets import with_nodes

    from hf_hsdraft.drafters.base.protocol import WrappedDrafter

    for count in rows:
        wrapped = WrappedDrafter(drafter)
        with_nodes(wrapped, count - 1, 1)
        wrapped.generation_config.packed_weights = bool(packed)
        wrapped.generation_config.compiled_layers = False
        yield f"{count} rows", wrapped


def loaded(name: str, given: Any) -> tuple[Any, Any, Any]:
    """A target by its name, a prompt, and its drafter; an untrained one where none is known."""
    import torch
    from gpu_bench.targets import TINY, random_drafter
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hf_hsdraft.bench.calls import DEFAULT_PROMPTS
    from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import default_drafter, load_target

    if given.tiny:
        config = LlamaConfig(**asdict(TINY), eos_token_id=None, pad_token_id=0)
        target = AutoModelForCausalLM.from_config(config, dtype=dtype_of(given)).eval()
        ids = torch.arange(1, 33)[None]
        return target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, random_drafter(target)
    target, tokenizer = load_target(None if name == "smollm2" else name, dtype_of(given))
    folder = default_drafter(None) if name == "smollm2" else None
    drafter = HSDrafter.from_pretrained(folder, dtype=dtype_of(given)) if folder else random_drafter(target)
    return target, encode_prompt(tokenizer, DEFAULT_PROMPTS[0].turns[0]), drafter.eval()


def _cells(row: Mapping[str, Any]) -> list[Any]:
    sizes = [f"{row['operators']:,.0f}", f"{row['beyond']:,.0f}" if row["beyond"] else ""]
    return [row["target"], row["part"], *sizes, f"{1e3 * row['seconds']:.1f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, dtype="bfloat16", json=None)
    parser.add_argument("--targets", type=names, default=["smollm2"], help="default: smollm2")
    parser.add_argument("--rows", type=counts, default=[9, 25], help="rows of the rounds' forwards; default: 9,25")
    parser.add_argument("--packed", type=int, choices=(0, 1), default=1, help="rounds multiply by packed weights")
    parser.add_argument("--tiny", action="store_true", help="a small random target")
    given = parser.parse_args(arguments)
    import torch

    from hf_hsdraft.bench.calls import processor

    rows = list[dict[str, Any]]()
    for name in given.targets:
        target, inputs, drafter = loaded(name, given)
        costs = costs_of(target, inputs, dict(drafters_of(drafter, given.rows, given.packed)))
        step = costs["plain step"].operators
        for part, cost in costs.items():
            beyond = cost.operators - step if part.startswith("round") else 0.0
            rows.append({"target": name, "part": part, **asdict(cost), "beyond": beyond})
    place = f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads"
    print(place)
    print_table(("target", "part", "operators", "beyond a step", "ms"), map(_cells, rows))
    keep(given.json, {"machine": place, "torch": torch.__version__, "dtype": given.dtype, "rows": rows})


if __name__ == "__main__":
    main()
