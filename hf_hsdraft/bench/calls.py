"""One timed call of one system."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..acceleration.cpu.packed_weights import PackedWeights, linears_to_pack
from ..engine.call_output import DraftStatistics
from .machine import PeakMemory, synchronise
from .measure import Divergence
from .systems import PLAIN, System, with_options


@dataclass(frozen=True)
class Settings:
    """How every system decodes.

    Attributes:
        max_new_tokens: at most, each prompt.
        temperature: 0 decodes greedily; above it, tokens are drawn at that temperature as `generate()` draws them by
            itself (transformers' own top-k of 50 among it), the same seed set before every call.
        max_cache_len: tokens that caches of a fixed length hold, so that all calls share one.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    max_cache_len: int | None = None

    def generate_kwargs(self) -> dict[str, Any]:
        """For `generate()`; a target's own generation configuration stands where these say nothing."""
        common: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "return_dict_in_generate": True}
        if self.temperature == 0:
            return {**common, "do_sample": False}
        return {**common, "do_sample": True, "temperature": self.temperature}


@dataclass
class Run:
    """One call; times in seconds, memory in bytes.

    Attributes:
        tokens: new tokens of all its rows, ends of text included and padding not.
        forwards: of the target, the prompts' included; counted by rows where our statistics are there.
        rows: prompts in the call.
        statistics: of our decoding; `None` where others decode.
        first_seconds: until the first new token was handed on; first_tokens: how many came with it.
        accepted: drafted tokens accepted in each round, where the system tells.
        memory_before, memory_peak: what was held when the call began, and at most while it ran.
        same_rows: rows with plain decoding's text; `None` where there is nothing to compare.
        divergence: of a single prompt, where its text parted from plain decoding's.
        question, repeat: which prompt (or batch) it was, and which round of all of them.
    """

    tokens: int
    seconds: float
    forwards: int
    rows: int = 1
    statistics: DraftStatistics | None = None
    first_seconds: float | None = None
    first_tokens: int = 0
    accepted: list[int] | None = None
    memory_before: int | None = None
    memory_peak: int | None = None
    same_rows: int | None = None
    divergence: Divergence | None = None
    question: int = 0
    repeat: int = 0


class ArrivalStreamer(BaseStreamer):
    """Notes when the first new tokens came, and how many came at each time; the prompt, handed on first, is none."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.sizes: list[int] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        if self.first is None:
            self.first = time.perf_counter()
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class ForwardCounter:
    """Counts the target's forwards, whoever calls them: tau of every system comes from the same count.

    A forward is a call of the first decoder layer; not everyone calls the model as a whole.
    """

    def __init__(self, target: Any) -> None:
        self.count = 0
        layers = getattr(target.base_model, "layers", None)
        self._handle = (target if layers is None else layers[0]).register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def remove(self) -> None:
        self._handle.remove()


def time_call(
    target: Any, inputs: dict[str, torch.Tensor], system: System, settings: Settings
) -> tuple[list[list[int]], Run]:
    """Decodes a prompt, or a batch padded at the left, once.

    Args:
        inputs: `input_ids` and `attention_mask`, each `[B, length]`.

    Returns:
        the new tokens of each row, and what was measured.
    """
    stored = system.drafter.generation_config if system.options else None
    memory = PeakMemory(target.device)
    # A hook would be compiled into a static forward, and compiled anew with every count.
    counter = None if system.static else ForwardCounter(target)
    try:
        if system.options:
            with_options(system.drafter, system.options)
        torch.manual_seed(settings.seed)
        synchronise(target.device)
        before = memory.start()
        begin = time.perf_counter()
        rows, run = (_decode if system.decode is not None else _generate)(target, inputs, system, settings)
        synchronise(target.device)
        run.seconds = time.perf_counter() - begin
        run.memory_before, run.memory_peak = before, None if before is None else memory.peak()
    finally:
        if counter is not None:
            counter.remove()
        if system.options:
            system.drafter.generation_config = stored
    rows = [until_end(row, target) for row in rows]
    if run.first_seconds is not None:
        run.first_seconds -= begin
    run.rows, run.tokens = len(rows), sum(map(len, rows))
    run.forwards = max(map(len, rows)) if counter is None else counter.count
    if system.decode is not None and len(rows) == 1 and run.accepted is not None:
        # Rounds without a draft are not among them, and accepted nothing.
        run.accepted += [0] * (run.forwards - 1 - len(run.accepted))
    if run.statistics is not None and len(rows) > 1:
        run.forwards = run.statistics.row_forwards
    return rows, run


def _generate(
    target: Any, inputs: dict[str, torch.Tensor], system: System, settings: Settings
) -> tuple[list[list[int]], Run]:
    streamer = ArrivalStreamer()
    kwargs = {**settings.generate_kwargs(), **system.generate_kwargs, "streamer": streamer}
    if system.static and settings.max_cache_len is not None:
        kwargs["max_cache_len"] = settings.max_cache_len
    packed = PackedWeights(linears_to_pack(target, True)).in_use() if system.packed else contextlib.nullcontext()
    with packed:
        output = target.generate(**inputs, **kwargs)
    statistics = getattr(output, "statistics", None)
    run = Run(0, 0.0, 0, statistics=statistics, first_seconds=streamer.first)
    run.first_tokens = streamer.sizes[0] if streamer.sizes else 0
    if statistics is not None:
        run.accepted = list(statistics.accepted_lengths)
    elif system.name != PLAIN and not (system.static or system.packed) and len(inputs["input_ids"]) == 1:
        rounds = streamer.sizes[1:] if system.drafts_later else streamer.sizes
        run.accepted = [size - 1 for size in rounds]  # assisted decoding hands on a round at a time
    start = inputs["input_ids"].shape[1] if not target.config.is_encoder_decoder else 1
    return output.sequences[:, start:].tolist(), run


def _decode(
    target: Any, inputs: dict[str, torch.Tensor], system: System, settings: Settings
) -> tuple[list[list[int]], Run]:
    assert system.decode is not None
    run = Run(0, 0.0, 0, first_tokens=1)
    arrivals: list[float] = []
    prompts = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    answers = system.decode(
        prompts,
        settings.max_new_tokens,
        settings.temperature,
        settings.seed,
        lambda: arrivals.append(time.perf_counter()),
    )
    run.first_seconds = arrivals[0] if arrivals else None
    run.first_tokens = len(answers)
    run.accepted = [length for answer in answers for length in answer.accepted]
    return [answer.tokens for answer in answers], run


def until_end(tokens: Sequence[int], target: Any) -> list[int]:
    """New tokens up to and with the first end of text; what comes after it is padding."""
    ends = target.generation_config.eos_token_id
    stops = set(ends) if isinstance(ends, list | tuple) else {ends} - {None}
    return list(tokens[: next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))])
