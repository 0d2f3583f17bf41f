"""Where the time of a round goes, by the interpreter's reports, and how fast it would be if only forwards took time."""

from __future__ import annotations

import contextvars
import copy
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from ..bench.calls import Inputs, Settings, synchronise, time_call, timed
from ..bench.report import note
from ..bench.systems import System
from ..core.cache_name import CACHE, given_cache
from ..core.draft_tree import TreeBatch
from ..cpu.packed_weights import PackedWeights, packed_now
from ..drafters.base.tree_session import ParallelExpansion
from ..drafters.hidden_state.draft_session import HSDraftSession, RollOut
from ..drafters.hidden_state.network import WorkingWeights
from ..drafters.lookup.ngrams import NgramSession
from ..engine.decoded_texts import DecodedTexts
from ..engine.drafting import Drafting
from ..engine.loop import decode
from ..runtime.cache_slots import give_room_back
from ..runtime.target_runtime import TargetRuntime
from ..runtime.tree_reading import as_attention_takes_it, tree_mask
from .static_roll_out import StaticRollOut

TARGET, PYTHON = "target forward", "Python"
PARTS = (
    "context update", "roll-out", "head", "injector", "n-grams", "tree building", "mask", TARGET, "verification",
    "commit", PYTHON,
)  # fmt: skip
DEFINITIONS = {
    "profile": "milliseconds of a round by part; the parts add up to the round. These rounds are slower than those of "
    "the table, because the interpreter reports each function and, on a GPU, every part is waited for",
    "limit": "tau x t(1) / t(n): the speed-up of the same tau if all but the target's forward were free. tau: tokens a "
    "round, the prompt's forward left out; t(1): a forward over one token; t(n): the forward that verifies n nodes, "
    "the root included, n as in the mean round; medians over copies of one cache",
    "reached": "the table's speed-up after the first token, measured without timers, over the limit",
}
# The functions of each part. Time that another part takes inside a function belongs to that part. The target is a
# module, and the rest of a round is Python.
TIMED: dict[str, tuple[Callable[..., Any], ...]] = {
    "context update": (HSDraftSession.columns, RollOut.read),
    "roll-out": (RollOut.__call__, StaticRollOut.__call__, StaticRollOut.beam),
    "head": (WorkingWeights.logits,),
    "injector": (ParallelExpansion.__call__, ParallelExpansion.best),
    "n-grams": (NgramSession.draft, NgramSession.observe),
    "tree building": (Drafting.draft,),
    "mask": (tree_mask, as_attention_takes_it, TreeBatch.of),
    TARGET: (),
    "verification": (DecodedTexts.judge,),
    "commit": (TargetRuntime.commit,),
    PYTHON: (decode,),
}
_FORWARDS = 7  # number of forwards timed for t(1) and for t(n)


@dataclass(frozen=True)
class Profile:
    """Measurements of the rounds of one system; means are over its rounds."""

    rounds: int
    round_ms: float  # mean milliseconds of a round
    parts: dict[str, float]  # mean milliseconds of each part; they sum to `round_ms`
    tau: float  # mean tokens a round
    nodes: float  # mean nodes verified in a round, the root included
    timed_nodes: int | None  # number n of nodes of the repeated forward; `None` if no forward could be repeated
    forward_one_ms: float | None  # t(1), milliseconds of a forward over one token; `None` as above
    forward_nodes_ms: float | None  # t(n), milliseconds of the repeated forward; `None` as above
    decode_speed_up: float | None = None  # measured without timers; `None` if not measured

    @property
    def limit(self) -> float | None:
        """Speed-up of the same tau if all but the target's forward were free; `None` if unknown."""
        if self.forward_one_ms is None or self.forward_nodes_ms is None:
            return None
        return self.tau * self.forward_one_ms / self.forward_nodes_ms

    @property
    def reached(self) -> float | None:
        """Share of the limit that was reached, 0 to 1; `None` if unknown."""
        limit = self.limit
        return None if limit is None or self.decode_speed_up is None else self.decode_speed_up / limit

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "limit": self.limit, "reached": self.reached}

    def line(self, name: str) -> str:
        """Says what the limit is and how much of it the system of this name has reached."""
        if self.limit is None:
            return f"{name}: no limit, none of its forwards could be repeated"
        line = (
            f"{name}: limit {self.limit:.2f} = tau {self.tau:.2f} x t(1) {self.forward_one_ms:.2f} ms / "
            f"t({self.timed_nodes}) {self.forward_nodes_ms:.2f} ms, {self.nodes:.1f} nodes a round"
        )
        if self.reached is None:
            return line
        return f"{line}; measured {self.decode_speed_up:.2f}, reached {self.reached:.0%}"


def print_profiles(profiles: Mapping[str, Profile], console: Console) -> None:
    """Prints the profiles of some systems, by their names."""
    table = Table("ms a round (share)", *map(escape, profiles))
    for part in PARTS:
        cells = [f"{each.parts[part]:.2f} ({each.parts[part] / each.round_ms:.0%})" for each in profiles.values()]
        table.add_row(part, *cells)
    table.add_row("round", *(f"{each.round_ms:.2f}" for each in profiles.values()))
    console.print(table)
    note(console, *(each.line(name) for name, each in profiles.items()))


def profile(
    target: Any, system: System, inputs: Sequence[Inputs], settings: Settings, decode_speed_up: float | None = None
) -> Profile | None:
    """Times the parts of every round of decoding some prompts. No other thread should use the target meanwhile.

    `system` is one of ours, warmed up; `decode_speed_up` was measured without timers. Returns None if there was no
    round, because all texts ended with their first token.
    """
    tokens = nodes = rounds = 0
    spent = Attribution(target)
    with spent.counting():
        for each in inputs:
            _, run = time_call(target, each, system, settings)
            assert run.statistics is not None
            tokens += run.tokens - run.first_tokens
            nodes += sum(size + 1 for size in run.statistics.drafted_nodes)
            rounds += run.statistics.rounds
    if not rounds:
        return None
    call = _verifying_call(target, system, inputs[0], settings, round(nodes / rounds))
    one, many = (None, None) if call is None else _forward_times(target, call)
    return Profile(
        rounds=rounds,
        round_ms=1e3 * sum(spent.seconds.values()) / rounds,
        parts={part: 1e3 * spent.seconds[part] / rounds for part in PARTS},
        tau=tokens / rounds,
        nodes=nodes / rounds,
        timed_nodes=None if call is None else call.nodes,
        forward_one_ms=one,
        forward_nodes_ms=many,
        decode_speed_up=decode_speed_up,
    )


@dataclass(frozen=True)
class _VerifyingCall:
    """A forward of the target that can be repeated."""

    arguments: dict[str, Any]  # with a copy of the cache
    context: contextvars.Context
    packed: list[nn.Linear]  # layers that multiplied by packed weights

    @property
    def nodes(self) -> int:
        return self.arguments["input_ids"].shape[1]


def _verifying_call(
    target: Any, system: System, inputs: Inputs, settings: Settings, nodes: int
) -> _VerifyingCall | None:
    """Returns the last forward whose number of nodes is closest to `nodes`; None if none can be repeated."""
    best: _VerifyingCall | None = None

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal best
        cache, ids = given_cache(kwargs), kwargs.get("input_ids")
        if not args and ids is not None and cache is not None and cache.get_seq_length():
            distance = abs(ids.shape[1] - nodes)
            if best is None or distance <= abs(best.nodes - nodes):
                kept = {**kwargs, CACHE: copy.deepcopy(cache)}
                best = _VerifyingCall(kept, contextvars.copy_context(), packed_now(target))

    with target.register_forward_pre_hook(look, with_kwargs=True):
        time_call(target, inputs, system, settings)
    return best


@torch.inference_mode()
def _forward_times(target: Any, call: _VerifyingCall) -> tuple[float, float]:
    """Returns the median milliseconds of a plain forward over one token, and of `call`, in turn."""
    many, cache = call.arguments, given_cache(call.arguments)
    mask, own = many.get("attention_mask"), copy.deepcopy(cache)
    give_room_back(getattr(own, "self_attention_cache", own))
    one = {name: value for name, value in many.items() if name not in ("attention_mask", "output_hidden_states")}
    one[CACHE] = own
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        one["attention_mask"] = mask[:, : cache.get_seq_length() + 1]
    for name in ("input_ids", "position_ids", "cache_position"):
        if isinstance(one.get(name), torch.Tensor):
            one[name] = one[name][..., :1]
    if "logits_to_keep" in one:
        one["logits_to_keep"] = 1

    def seconds(arguments: dict[str, Any], context: contextvars.Context, packed: PackedWeights) -> float:
        given = {**arguments, CACHE: copy.deepcopy(arguments[CACHE])}

        def forward() -> None:
            with packed.in_use():
                target(**given)

        return timed(target.device, context.run, forward)[1]

    plain, nothing, packed = contextvars.copy_context(), PackedWeights([]), PackedWeights(call.packed)
    pairs = [(seconds(one, plain, nothing), seconds(many, call.context, packed)) for _ in range(_FORWARDS + 1)]
    one_s, many_s = (statistics.median(column) for column in zip(*pairs[1:], strict=True))  # the first warms up
    return 1e3 * one_s, 1e3 * many_s


class Attribution:
    """Counts the seconds of each of `PARTS`.

    Where functions call one another, only the innermost counts, so no time is counted twice. The interpreter
    reports the start and end of every Python function, which itself takes time, most of all in parts with many
    small functions. There are no reports within the target's forward, so it takes no longer than usual. Time outside
    `decode` is not counted. The device is synchronised whenever a part begins or ends.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._parts: dict[CodeType, str] = {_code(each): part for part, those in TIMED.items() for each in those}
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []  # the parts that have begun, the innermost last
        self._last = 0.0  # time when the last part began or ended

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the functions that this thread runs within the context."""
        before = sys.getprofile()
        begins = self._target.register_forward_pre_hook(self._target_begins)
        ends = self._target.register_forward_hook(self._target_ends, always_call=True)
        with begins, ends:
            sys.setprofile(self._on_event)
            try:
                yield
            finally:
                sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        part = self._parts.get(frame.f_code)
        if part is None:
            return
        if event == "call":
            self._enter(part)
        elif event == "return":  # an exception is reported as a return too
            self._leave()

    def _target_begins(self, *_: Any) -> None:
        sys.setprofile(None)
        self._enter(TARGET)

    def _target_ends(self, *_: Any) -> None:
        self._leave()
        sys.setprofile(self._on_event)

    def _enter(self, part: str) -> None:
        if self._open or part == PYTHON:  # nothing is counted outside `decode`
            self._count()
            self._open.append(part)

    def _leave(self) -> None:
        if self._open:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        """Adds the time since the last event to the innermost part."""
        synchronise(self._target.device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now


def _code(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__
