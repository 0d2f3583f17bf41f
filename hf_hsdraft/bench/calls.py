"""One timed call of one system, the memory that it takes, and the machine that it runs on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

from ..core.statistics import DraftStatistics
from ..cpu.packed_weights import PackedWeights, linears_to_pack
from ..runtime.misreading import Divergence
from ..runtime.prompt_inputs import end_tokens
from .systems import PLAIN, System, with_options

Result = TypeVar("Result")


def processor(device: torch.device) -> str:
    """Returns the name of a GPU, or the number and kind of the machine's cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    names, flags = (re.findall(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE) for field in ("model name", "flags"))
    name = names[0] if names else platform.processor() or platform.machine()
    units = " with AMX" if flags and "amx_bf16" in flags[0] else ""
    return f"{os.cpu_count()} cores of {name}{units} ({torch.backends.cpu.get_cpu_capability()})"


def synchronise(device: torch.device) -> None:
    """Waits for a GPU's queued work, so that a clock counts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, call: Callable[..., Result], *args: Any, **kwargs: Any) -> tuple[Result, float]:
    synchronise(device)
    begin = time.perf_counter()
    result = call(*args, **kwargs)
    synchronise(device)
    return result, time.perf_counter() - begin


class PeakMemory:
    """Peak bytes since `start`: allocated memory of a GPU, or resident memory of this process.

    It includes the weights of all loaded models. For a process it works on Linux only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int | None:
        """Resets the peak. Returns the bytes held now, or `None` where the system does not report them."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
        return resident_bytes()

    def peak(self) -> int | None:
        """Returns the peak since `start`; meaningless if that returned `None`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resident_bytes(field="VmHWM")


def resident_bytes(process: int | str = "self", field: str = "VmRSS") -> int | None:
    """Returns a process's resident memory, on Linux; `None` where the system does not report it."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


@dataclass(frozen=True)
class Settings:
    """How every system decodes."""

    max_new_tokens: int  # per prompt
    temperature: float = 0.0  # 0 decodes greedily, above 0 `generate()` samples, see `top_k`
    seed: int = 0  # set before every call
    # tokens to sample from, 0 for all; `None` for the target's generation configuration, or transformers' default of 50
    top_k: int | None = None
    max_cache_len: int | None = None  # tokens that static caches hold, so that all calls share one cache

    def generate_kwargs(self) -> dict[str, Any]:
        """Returns arguments for `generate()`. The target's generation configuration sets the rest."""
        common: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "return_dict_in_generate": True}
        if self.temperature == 0:
            return {**common, "do_sample": False}
        drawn = {} if self.top_k is None else {"top_k": self.top_k}
        return {**common, "do_sample": True, "temperature": self.temperature, **drawn}


@dataclass
class Run:
    """Measurements of one call."""

    tokens: int  # new tokens of all rows, ends of text included, padding excluded
    seconds: float
    forwards: int  # of the target, the prompts' included. Our decoding counts each one for every row
    rows: int = 1
    statistics: DraftStatistics | None = None
    first_seconds: float | None = None  # until the first new tokens were handed on
    first_tokens: int = 0  # their number
    # drafted tokens accepted in each round; `None` where the system does not report them
    accepted: list[int] | None = None
    memory_before: int | None = None  # bytes held when the call began
    memory_peak: int | None = None  # during the call
    same_rows: int | None = None  # rows with plain decoding's text; `None` where there is nothing to compare
    divergence: Divergence | None = None  # where the text of a single prompt diverged from plain decoding's
    question: int = 0  # index of the prompt or batch
    repeat: int = 0  # index of the repetition of all prompts


class ArrivalStreamer(BaseStreamer):
    """Records when the first new tokens arrive, after the prompt, and how many arrive each time."""

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


def time_call(
    target: Any, inputs: dict[str, torch.Tensor], system: System, settings: Settings
) -> tuple[list[list[int]], Run]:
    """Decodes a prompt, or a left-padded batch, once.

    `inputs` are `input_ids` and `attention_mask`, each `[B, length]`. Returns the new tokens of each row, and the
    measurements.
    """
    memory, forwards = PeakMemory(target.device), list[None]()
    with contextlib.ExitStack() as stack:
        # Compiled forwards would be compiled again at every count. Ours count their own, and run several layers in one
        # call where no hook sees them.
        if not (system.static or system.ours):
            # Some systems do not call the model as a whole, but all call its first layer.
            layers = getattr(target.base_model, "layers", None)
            counted = target if layers is None else layers[0]
            stack.enter_context(counted.register_forward_pre_hook(lambda *_: forwards.append(None)))
        if system.options:
            stack.callback(setattr, system.drafter, "generation_config", system.drafter.generation_config)
            with_options(system.drafter, system.options)
        torch.manual_seed(settings.seed)
        synchronise(target.device)
        before = memory.start()
        begin = time.perf_counter()
        rows, run = _generate(target, inputs, system, settings)
        synchronise(target.device)
        run.seconds = time.perf_counter() - begin
        run.memory_before, run.memory_peak = before, None if before is None else memory.peak()
    rows = [until_end(row, target) for row in rows]
    if run.first_seconds is not None:
        run.first_seconds -= begin
    run.rows, run.tokens = len(rows), sum(map(len, rows))
    run.forwards = max(map(len, rows)) if system.static else len(forwards)
    if run.statistics is not None:
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
        output = (system.generate or target.generate)(**inputs, **kwargs)
    statistics = getattr(output, "statistics", None)
    run = Run(0, 0.0, 0, statistics=statistics, first_seconds=streamer.first)
    run.first_tokens = streamer.sizes[0] if streamer.sizes else 0
    if statistics is not None:
        run.accepted = list(statistics.accepted_lengths)
    elif system.generate is not None:
        run.accepted = output.accepted
    elif system.name != PLAIN and not (system.static or system.packed) and len(inputs["input_ids"]) == 1:
        rounds = streamer.sizes[1:] if system.drafts_later else streamer.sizes
        run.accepted = [size - 1 for size in rounds]  # assisted decoding streams round by round
    start = inputs["input_ids"].shape[1] if not target.config.is_encoder_decoder else 1
    return output.sequences[:, start:].tolist(), run


def until_end(tokens: Sequence[int], target: Any) -> list[int]:
    """Returns the new tokens up to and including the first end of text; padding follows it."""
    ends = end_tokens(target)
    return list(tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))])
