"""Where the time of a round goes, and what the same tau would give if everything but the target's forward were free.

Methods are wrapped with timers for as long as a profile runs; decoding itself knows nothing of it.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import candidate_generator, decoded_texts, decoding, modeling_hsdraft, target_runtime
from .calls import Settings, time_call
from .machine import synchronise
from .run import Inputs
from .systems import System

TARGET, PYTHON = "target forward", "Python"
# What is timed: the part, and where its functions are. A function's time is its own: what another part takes inside it
# is that part's. What is left of a round is Python.
TIMED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("context update", modeling_hsdraft.HSDrafter, ("fuse_inputs",)),
    ("context update", modeling_hsdraft.HSDraftLayer, ("read",)),
    ("context update", candidate_generator.HSCandidateGenerator, ("read",)),
    ("roll-out", modeling_hsdraft.HSDrafter, ("forward",)),
    ("head", modeling_hsdraft.HSDrafter, ("logits",)),
    ("injector", candidate_generator.Expansion, ("__call__",)),
    ("tree building", candidate_generator.HSCandidateGenerator, ("draft",)),
    ("mask", target_runtime, ("tree_mask", "as_attention_takes_it")),
    ("mask", target_runtime.TreeBatch, ("of",)),
    ("verification", decoded_texts.DecodedTexts, ("walk",)),
    ("commit", target_runtime.TargetRuntime, ("commit",)),
    (PYTHON, decoding._Call, ("_round",)),
)
PARTS = tuple(
    dict.fromkeys([*(part for part, _, _ in TIMED if part not in ("verification", "commit", PYTHON)), TARGET])
)
PARTS += ("verification", "commit", PYTHON)
DEFINITIONS = {
    "profile": "milliseconds a round by part, the parts adding up to the round; timers and, on a GPU, waiting for it "
    "after each part make these rounds slower than those of the table",
    "limit": "tau x t(1) / t(n): the speed-up of the same tau if all but the target's forward were free. tau: tokens a "
    "round, the prompt's forward left out; t(1): a forward over one token; t(n): the forward that verifies n nodes, "
    "the root included, n as in the mean round; both over copies of one cache, medians",
    "reached": "the table's speed-up after the first token (not slowed by timers) over the limit",
}
_FORWARDS = 7  # timed for t(1) and t(n), each


@dataclass(frozen=True)
class Profile:
    """The rounds of one system; times in milliseconds.

    Attributes:
        rounds: how many were timed; round_ms: one of them, by a clock around all; parts: by part, adding up to it.
        tau: tokens a round; nodes: verified a round, the root included.
        forward_one_ms, forward_nodes_ms: t(1), and t(n) of `timed_nodes`; `None` if no round could be repeated.
        decode_speed_up: measured without timers; `None` if it was not.
    """

    rounds: int
    round_ms: float
    parts: dict[str, float]
    tau: float
    nodes: float
    timed_nodes: int | None
    forward_one_ms: float | None
    forward_nodes_ms: float | None
    decode_speed_up: float | None = None

    @property
    def limit(self) -> float | None:
        if self.forward_one_ms is None or self.forward_nodes_ms is None:
            return None
        return self.tau * self.forward_one_ms / self.forward_nodes_ms

    @property
    def reached(self) -> float | None:
        """Share of the limit, 0 to 1."""
        limit = self.limit
        return None if limit is None or self.decode_speed_up is None else self.decode_speed_up / limit


class _Timers:
    """Seconds by part. Of functions within functions only the innermost runs, so nothing is counted twice."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.rounds = 0
        self.total = 0.0
        self._device = device
        self._open: list[str] = []
        self._last = self._begin = 0.0

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._open and part != PYTHON:  # not in a round: the prompt's forward
                return function(*args, **kwargs)
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _now(self) -> float:
        synchronise(self._device)
        return time.perf_counter()

    def _enter(self, part: str) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        else:
            self._begin = now
        self._open.append(part)
        self._last = now

    def _leave(self) -> None:
        now = self._now()
        self.seconds[self._open.pop()] += now - self._last
        self._last = now
        if not self._open:
            self.rounds += 1
            self.total += now - self._begin


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `owner.name` is what `change` makes of it; a class, a module or a single object may own it.

    Raises:
        AttributeError: there is no such function.
    """
    own = vars(owner).get(name)
    present = getattr(owner, name)  # bound, if it is a class method
    changed = change(present)
    setattr(owner, name, staticmethod(changed) if isinstance(own, classmethod | staticmethod) else changed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def _timing(target: Any) -> Iterator[_Timers]:
    timers = _Timers(target.device)
    with _all_replaced(
        [(part, owner, name) for part, owner, names in TIMED for name in names] + [(TARGET, target, "forward")], timers
    ):
        yield timers


@contextmanager
def _all_replaced(rest: Sequence[tuple[str, Any, str]], timers: _Timers) -> Iterator[None]:
    if not rest:
        yield
        return
    part, owner, name = rest[0]
    with replaced(owner, name, lambda function: timers.wrap(part, function)), _all_replaced(rest[1:], timers):
        yield


def profile(
    target: Any, system: System, inputs: Sequence[Inputs], settings: Settings, decode_speed_up: float | None = None
) -> Profile | None:
    """Times the parts of every round of decoding these prompts. No other thread should decode meanwhile.

    Args:
        system: one of ours, warmed up.
        decode_speed_up: as measured without timers.

    Returns:
        `None` if no round was decoded, as for prompts that end with their first token.
    """
    tokens = nodes = 0
    with _timing(target) as timers:
        for each in inputs:
            _, run = time_call(target, each, system, settings)
            assert run.statistics is not None
            tokens += run.tokens - run.first_tokens
            nodes += sum(size + 1 for size in run.statistics.drafted_nodes)
    if not timers.rounds:
        return None
    rounds = timers.rounds
    call = _verifying_call(target, system, inputs[0], settings, round(nodes / rounds))
    one, many = (None, None) if call is None else _forward_times(target, call)
    return Profile(
        rounds=rounds,
        round_ms=1e3 * timers.total / rounds,
        parts={part: 1e3 * seconds / rounds for part, seconds in timers.seconds.items()},
        tau=tokens / rounds,
        nodes=nodes / rounds,
        timed_nodes=None if call is None else call["input_ids"].shape[1],
        forward_one_ms=one,
        forward_nodes_ms=many,
        decode_speed_up=decode_speed_up,
    )


def _verifying_call(
    target: Any, system: System, inputs: Inputs, settings: Settings, nodes: int
) -> dict[str, Any] | None:
    """The arguments of the target's forward that verified closest to `nodes` nodes in a call, with a copy of its cache.

    Of equally close ones the first; `None` if none can be repeated.
    """
    best: dict[str, Any] = {}

    def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def watching(*args: Any, **kwargs: Any) -> Any:
            cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
            if not args and ids is not None and cache is not None and cache.get_seq_length():
                distance = abs(ids.shape[1] - nodes)
                if not best or distance < abs(best["input_ids"].shape[1] - nodes):
                    best.update({**kwargs, "past_key_values": copy.deepcopy(cache)})
            return forward(*args, **kwargs)

        return watching

    with replaced(target, "forward", watched):
        time_call(target, inputs, system, settings)
    return best or None


@torch.inference_mode()
def _forward_times(target: Any, call: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a forward over one token as plain decoding runs it, and of `call`; taken in turn, medians."""
    cached = call["past_key_values"].get_seq_length()
    mask = call.get("attention_mask")
    one = {name: value for name, value in call.items() if name not in ("attention_mask", "output_hidden_states")}
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        one["attention_mask"] = mask[:, : cached + 1]
    for name in ("input_ids", "position_ids", "cache_position"):
        if isinstance(one.get(name), torch.Tensor):
            one[name] = one[name][..., :1]
    if "logits_to_keep" in one:
        one["logits_to_keep"] = 1
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_FORWARDS + 1):
        for arguments, seconds in zip((one, call), times, strict=True):
            given = {**arguments, "past_key_values": copy.deepcopy(call["past_key_values"])}
            synchronise(target.device)
            begin = time.perf_counter()
            target(**given)
            synchronise(target.device)
            seconds.append(time.perf_counter() - begin)
    one_s, many_s = (statistics.median(seconds[1:]) for seconds in times)  # the first warms up
    return 1e3 * one_s, 1e3 * many_s
