"""Measures what a round costs, in steps of plain decoding, for a target of any shape with random weights.

    python benchmarks/round_cost.py --accept 0,2,1,3                  # a target with the shape of an 8B model
    python benchmarks/round_cost.py --accept 0,2,1,3 --tiny --dtype float32

Time does not depend on the values of weights. So no trained drafter is needed to measure which share of tau becomes
speed. Target and drafter run as usual, and a pattern decides how many drafted tokens each round accepts.

- round: median time from the begin of a round to the begin of the next one.
- step: median time from one token of plain `generate()` to the next one.
- cost: round / step.
- speed-up: tokens a round / cost. This is what the pattern gains over plain decoding.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from runner import dtype_of, keep, numbers, options

if TYPE_CHECKING:
    import torch

    from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, by the names of `LlamaConfig`. The defaults are those of Llama-3.1-8B."""

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    vocab_size: int = 128256


TINY = Shape(64, 4, 4, 2, 128, 512)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        accepted: number of drafted tokens to accept, round by round, over and over.
        draft_steps: greatest depth of a draft.
        tree_size: number of nodes of a draft besides the root.
        beam_width: number of nodes expanded at each depth.
        prompt_length: number of tokens of the prompt.
        rounds: number of rounds of a call.
        backend: backend of `torch.compile`; empty for no compilation.
        mode: mode of `torch.compile`.
    """

    accepted: tuple[int, ...]
    draft_steps: int = 5
    tree_size: int = 24
    beam_width: int = 8
    prompt_length: int = 512
    rounds: int = 48
    backend: str = "inductor"
    mode: str = "reduce-overhead"

    def __post_init__(self) -> None:
        if not self.accepted or not 0 <= min(self.accepted) <= max(self.accepted) <= self.draft_steps:
            raise ValueError(f"accept={self.accepted} is invalid: expected numbers from 0 to {self.draft_steps}")
        if self.tree_size < max(self.accepted):
            raise ValueError(f"tree_size={self.tree_size} is invalid: a path of {max(self.accepted)} has to fit in")

    @property
    def tau(self) -> float:
        """Mean number of tokens a round."""
        return 1 + sum(self.accepted) / len(self.accepted)

    @property
    def new_tokens(self) -> int:
        """Number of new tokens of a call."""
        return int(self.rounds * self.tau) + 1


@dataclass(frozen=True)
class RoundCost:
    """What was measured. Times are in milliseconds.

    Attributes:
        compiled: whether steps and rounds with a static cache were compiled.
        step: median time of a step with a static cache.
        round: median time of a round with a static cache.
        eager_step: median time of a step with a `DynamicCache`, not compiled.
        eager_round: median time of a round with a `DynamicCache`, not compiled.
        draft: mean time of the draft of a round with a static cache. The device is waited for after each part.
        verify: mean time of the verification of such a round.
        commit: mean time of the commit of such a round.
        waits: mean number of times that the host waits for the device in such a round; `None` without a GPU.
        tau: mean number of tokens a round.
        cost: `round / step`.
        speed_up: `tau / cost`.
        eager_speed_up: the same for the eager times.
    """

    compiled: bool
    step: float
    round: float
    eager_step: float
    eager_round: float
    draft: float
    verify: float
    commit: float
    waits: float | None
    tau: float
    cost: float
    speed_up: float
    eager_speed_up: float


def random_pair(shape: Shape, plan: Plan, device: torch.device, dtype: torch.dtype) -> tuple[Any, HSDrafter]:
    """Returns a target and a drafter with random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hf_hsdraft.drafters.hidden_state.configuration_hsdraft import HSDraftConfig
    from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter

    length = plan.prompt_length + plan.rounds * (plan.draft_steps + 1) + plan.tree_size + 2
    config = LlamaConfig(**asdict(shape), max_position_embeddings=max(length, 1024), eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        drafter = HSDrafter(HSDraftConfig.for_target(target, num_draft_steps=plan.draft_steps)).to(dtype).eval()
    options = drafter.generation_config
    options.num_assistant_tokens, options.tree_size = plan.draft_steps, plan.tree_size
    options.beam_width = plan.beam_width
    options.tree_sizing, options.ngram_length = "fixed", 0  # all drafts have the same size
    return target, drafter


def measure(target: Any, drafter: HSDrafter, plan: Plan) -> RoundCost:
    """Times steps and rounds, eager and compiled. All calls emit equally many tokens."""
    calls = _calls(plan, target.device)
    steps = {name: _time(target, plan, call, None) for name, call in calls.items()}
    rounds = {name: _time(target, plan, call, drafter) for name, call in calls.items()}
    last = [*calls][-1]
    statistics = _decode(target, plan, calls[last], drafter, return_dict_in_generate=True)[0].statistics
    parts = {
        name: 1000 * getattr(statistics, f"{name}_seconds") / statistics.rounds
        for name in ("draft", "verify", "commit")
    }
    cost = rounds[last] / steps[last]
    return RoundCost(
        compiled=last == "compiled",
        step=steps[last],
        round=rounds[last],
        eager_step=steps["eager"],
        eager_round=rounds["eager"],
        **parts,
        waits=_waits(target, drafter, plan, calls[last]),
        tau=plan.tau,
        cost=cost,
        speed_up=plan.tau / cost,
        eager_speed_up=plan.tau * steps["eager"] / rounds["eager"],
    )


def _calls(plan: Plan, device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns arguments of `generate()` for each way to compare."""
    from transformers import CompileConfig

    static = {
        "cache_implementation": "static",
        # Steps and rounds have the same length, so that their caches have one shape.
        "max_cache_len": plan.prompt_length + plan.new_tokens + plan.tree_size + 1,
    }
    calls: dict[str, dict[str, Any]] = {"eager": {}}
    if not plan.backend:
        return calls | {"static": {**static, "disable_compile": True}}
    config = CompileConfig(backend=plan.backend, mode=plan.mode)
    config._compile_all_devices = device.type == "cpu"
    return calls | {"compiled": {**static, "compile_config": config}}


class _Stopwatch:
    """Notes, as a logits processor, when plain decoding chooses each token. The device has finished the one before."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def _decode(
    target: Any, plan: Plan, call: Mapping[str, Any], drafter: HSDrafter | None, **kwargs: Any
) -> tuple[Any, list[float]]:
    """Returns what `generate()` returns, and the times when each step or round began and the last one ended."""
    import torch
    from oracles.forced_drafter import ForcedDrafter
    from transformers import LogitsProcessorList

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, target.config.vocab_size, (1, plan.prompt_length), generator=generator).to(target.device)
    settings = {"do_sample": False, "max_new_tokens": plan.new_tokens, **call, **kwargs}
    if drafter is None:
        watch = _Stopwatch()
        return target.generate(ids, logits_processor=LogitsProcessorList([watch]), **settings), watch.times
    forced = ForcedDrafter(drafter, plan.accepted)
    return target.generate(ids, assistant_model=forced, **settings), forced.times


def _time(target: Any, plan: Plan, call: Mapping[str, Any], drafter: HSDrafter | None) -> float:
    """Returns the median milliseconds of a step or a round."""
    _decode(target, plan, call, drafter)  # compiles
    times = _decode(target, plan, call, drafter)[1]
    # The first ones may take longer, and the end of the text cuts the last one short.
    return median(1000 * (after - before) for before, after in itertools.pairwise(times[2:-1]))


def _waits(target: Any, drafter: HSDrafter, plan: Plan, call: Mapping[str, Any]) -> float | None:
    """Returns the mean number of times that the host waits for the device in a round; `None` without a GPU."""
    import torch

    if target.device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            times = _decode(target, plan, call, drafter)[1]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught) / (len(times) - 1)


def parser() -> ArgumentParser:
    """Returns the options: sizes of the target and of the plan, by their names."""
    made = options(__doc__, dtype="bfloat16", device="", json=None)
    made.add_argument("--accept", type=numbers, default=[0, 2, 1, 3], help="drafted tokens accepted, round by round")
    made.add_argument("--tiny", action="store_true", help="a shape for a CPU, in seconds")
    for each in (*fields(Shape), *fields(Plan)):
        if each.name != "accepted":
            kind = str if isinstance(each.default, str) else int
            made.add_argument(
                "--" + each.name.replace("_", "-"), type=kind, default=each.default, help=f"default: {each.default}"
            )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what a round costs, in steps of plain decoding, and prints it as JSON."""
    made = parser()
    given = made.parse_args(arguments)
    shape, plan = ({each.name: getattr(given, each.name, None) for each in fields(kind)} for kind in (Shape, Plan))
    try:
        plan = Plan(**{**plan, "accepted": tuple(given.accept)})
    except ValueError as error:
        made.error(str(error))
    import torch

    place = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = TINY if given.tiny else Shape(**shape)
    target, drafter = random_pair(shape, plan, place, dtype_of(given))
    report = {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "dtype": given.dtype,
        "torch": torch.__version__,
        "target": asdict(shape),
        "plan": asdict(plan),
        "milliseconds": asdict(measure(target, drafter, plan)),
    }
    keep(given.json, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
