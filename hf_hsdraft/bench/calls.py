"""Timed calls: of one system on one machine, and of several over prompts, in changing order, or along a sweep."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

from ..core.statistics import DraftStatistics
from ..cpu.packed_weights import PackedWeights, linears_to_pack
from ..runtime.misreading import Divergence, first_divergence
from ..runtime.prompt_inputs import encode_batch, encode_prompt, end_tokens, length_of
from ..runtime.target_limits import furthest_position
from ..training.data.conversations import Prompt, read_prompts
from .systems import PLAIN, System, with_options

Result = TypeVar("Result")
Inputs = dict[str, torch.Tensor]

with resources.as_file(resources.files(__package__) / "default_prompts.jsonl") as _file:
    DEFAULT_PROMPTS = tuple(read_prompts(_file))
NOTE = f"no --prompts given: {len(DEFAULT_PROMPTS)} prompts that come with the package"
WARM_UP_TOKENS = 96  # enough rounds for a pace to learn what forwards cost
CONTEXT, BATCH, NEW = "context_lengths", "batch_sizes", "new_tokens"  # axes of sweeps
MEANING = {
    CONTEXT: "prompts filled up to at most so many tokens, by text of other prompts before them in the user's turn",
    BATCH: "so many prompts a call, of similar length, padded at the left; tokens/s and texts are those of all rows",
    NEW: "greatest number of tokens that a call emits; every call here comes after a warm-up",
}


def processor(device: torch.device) -> str:
    """Returns the name of a GPU, or the number and kind of the machine's cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    names, flags = (re.findall(rf"^{title}\s*:\s*(.*)$", text, re.MULTILINE) for title in ("model name", "flags"))
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


def time_call(target: Any, inputs: Inputs, system: System, settings: Settings) -> tuple[list[list[int]], Run]:
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


def _generate(target: Any, inputs: Inputs, system: System, settings: Settings) -> tuple[list[list[int]], Run]:
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


def read_questions(paths: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """Reads prompt files, or takes the prompts of the package if there is no file; see `spread`.

    Raises a ValueError if a file is missing, or the files hold no prompt.
    """
    found: list[Prompt] = [] if paths else [*DEFAULT_PROMPTS]
    for path in paths:
        if not path.exists():
            raise ValueError(f"--prompts {path} does not exist: expected a JSONL file")
        found += read_prompts(path)
    if not found:
        raise ValueError("no questions: the prompt files hold no line with `turns`")
    return spread(found, limit)


def spread(questions: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Returns at most `limit` questions, in turn from all categories, in file order within each category."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    rounds = max((len(group) for group in groups.values()), default=0)
    ordered = [group[turn] for turn in range(rounds) for group in groups.values() if turn < len(group)]
    return ordered[:limit]


def padded_prompt(tokenizer: Any, prompt: str, others: Sequence[str], length: int) -> str | None:
    """Puts as much text of other prompts in front of a prompt as fits into `length` tokens, chat template included.

    Returns the user's turn; `None` if the prompt alone is too long.
    """
    if length_of(tokenizer, prompt) > length:
        return None
    words = " ".join(others).split()
    if not words:
        return prompt
    words = words * (length // len(words) + 1)  # a word has at least one token

    def with_words(count: int) -> str:
        return " ".join(words[len(words) - count :]) + "\n\n" + prompt

    counts = range(1, len(words) + 1)
    most = bisect_right(counts, length, key=lambda count: length_of(tokenizer, with_words(count)))
    return with_words(most) if most else prompt


def padded_batches(tokenizer: Any, prompts: Sequence[str], size: int, device: Any) -> list[Inputs]:
    """Returns left-padded batches of prompts of similar length. Some of the longest prompts may be left out."""
    ordered = sorted(prompts, key=len)
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side, tokenizer.pad_token = "left", pad or tokenizer.eos_token
    try:
        return [
            encode_batch(tokenizer, ordered[start : start + size], device)
            for start in range(0, len(ordered) - size + 1, size)
        ]
    finally:
        tokenizer.padding_side, tokenizer.pad_token = side, pad


@dataclass
class Measured:
    """All calls of a comparison."""

    # calls of each system, plain decoding first. Each list goes prompt by prompt, repeat after repeat
    runs: dict[str, list[Run]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # systems that could not decode, with the reason
    first: dict[str, Run] = field(default_factory=dict)  # first call of each system, not included in `runs`

    @property
    def plain(self) -> list[Run]:
        return self.runs[PLAIN]

    @property
    def others(self) -> dict[str, list[Run]]:
        """The calls of all systems but plain decoding."""
        return {name: runs for name, runs in self.runs.items() if name != PLAIN and runs}


def turn_order(items: Sequence[Result], turn: int) -> list[Result]:
    """Returns the items in the order of one turn.

    Every two turns the items rotate by one place; the second turn of the two is reversed. Over `2 n` turns each of the
    `n` items has every place twice, and precedes each other item as often as it follows it.
    """
    start = turn // 2 % max(len(items), 1)
    rotated = [*items[start:], *items[:start]]
    return rotated[::-1] if turn % 2 else rotated


def measure(
    target: Any,
    systems: Sequence[System],
    inputs: Sequence[Inputs],
    settings: Settings,
    repeats: int = 1,
    tell: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Lets every system decode every prompt (or batch) several times, after a short warm-up.

    Plain decoding is always measured too. The seed of `settings` is that of the first prompt and grows by 1 per prompt.
    `tell` is called with all calls so far whenever all systems have decoded a prompt. Raises what plain decoding or one
    of our systems raises; other systems that fail are left out.
    """
    longest = max(each["input_ids"].shape[1] for each in inputs) + settings.max_new_tokens
    settings = replace(settings, max_cache_len=longest)
    going = [System(PLAIN), *systems]
    measured = Measured({system.name: [] for system in going})

    def call(system: System, each: Inputs, how: Settings) -> tuple[list[list[int]], Run] | None:
        try:
            return time_call(target, each, system, how)
        except Exception as error:
            if system.ours or system.name == PLAIN:
                raise
            going.remove(system)
            del measured.runs[system.name]
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            measured.left_out[system.name] = f"{type(error).__name__}: {reason}"[:300]
            return None

    short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    for system in list(going):
        for _ in range(2 if system.static else 1):  # the first call compiles, the second records CUDA graphs
            found = call(system, inputs[0], short) if system in going else None
            if found is not None:
                measured.first.setdefault(system.name, found[1])
    for repeat in range(repeats):
        for question, each in enumerate(inputs):
            texts: dict[str, list[list[int]]] = {}
            seeded = replace(settings, seed=settings.seed + question)
            for system in turn_order(going, question + repeat):
                found = call(system, each, seeded)
                if found is not None:
                    texts[system.name], run = found
                    run.question, run.repeat = question, repeat
                    measured.runs[system.name].append(run)
            for system in going:
                _compare(target, each, measured.runs[system.name][-1], texts, system, settings)
            tell(measured)
    return measured


def _compare(
    target: Any, inputs: Inputs, run: Run, texts: dict[str, list[list[int]]], system: System, settings: Settings
) -> None:
    """Records how a call's texts differ from plain decoding's, if they should be equal."""
    plain, own = texts[PLAIN], texts[system.name]
    # Plain decoding samples the tokens of all rows at once, other systems row by row.
    if settings.temperature > 0 and not (system.draws_as_plain and len(plain) == 1):
        return
    run.same_rows = sum(a == b for a, b in zip(plain, own, strict=True))
    if len(plain) > 1 or run.same_rows:
        return
    ids = inputs["input_ids"]
    whole = [torch.cat([ids, ids.new_tensor([tokens])], dim=1) for tokens in (plain[0], own[0])]
    found = first_divergence(target, ids.shape[1], *whole)
    if found is not None:
        run.divergence = found if settings.temperature == 0 else Divergence(found.step, None)


@dataclass(frozen=True)
class SweepPoint:
    """Measurements at one context length, batch size or number of new tokens."""

    value: int
    prompt_tokens: float  # mean number of tokens of a prompt, without padding
    measured: Measured


def check_points(
    target: Any, tokenizer: Any, prompts: Sequence[str], points: Mapping[str, Sequence[int]], max_new_tokens: int
) -> None:
    """Raises a ValueError if a point cannot be measured with these prompts and this target."""
    window = furthest_position(target)
    lengths = [length_of(tokenizer, prompt) for prompt in prompts]
    for length in points.get(CONTEXT, ()):
        if length + max_new_tokens > window:
            raise ValueError(
                f"context length {length} and {max_new_tokens} new tokens are more than the target's {window} positions"
            )
        if length < min(lengths):
            raise ValueError(
                f"no prompt is as short as context length {length}: the shortest has {min(lengths)} tokens"
            )
    for count in points.get(NEW, ()):
        if max(lengths) + count > window:
            raise ValueError(
                f"the longest prompt, of {max(lengths)} tokens, and {count} new tokens are more than the target's "
                f"{window} positions"
            )
    for size in points.get(BATCH, ()):
        if size > len(prompts):
            raise ValueError(f"a batch of {size} needs as many prompts; there are {len(prompts)}")


def sweep(
    target: Any,
    tokenizer: Any,
    systems: Sequence[System],
    prompts: Sequence[str],
    axis: str,
    values: Sequence[int],
    settings: Settings,
    repeats: int = 1,
) -> Iterator[SweepPoint]:
    """Measures plain decoding and all systems at each value of an axis: `CONTEXT`, `BATCH` or `NEW`."""
    for value in values:
        how = replace(settings, max_new_tokens=value) if axis == NEW else settings
        if axis == BATCH:
            inputs = padded_batches(tokenizer, prompts, value, target.device)
        else:
            texts: Sequence[str | None] = prompts
            if axis == CONTEXT:
                texts = [
                    padded_prompt(tokenizer, prompt, [*prompts[index + 1 :], *prompts[:index]], value)
                    for index, prompt in enumerate(prompts)
                ]
            inputs = [encode_prompt(tokenizer, text, target.device) for text in texts if text is not None]
        tokens = sum(int(each["attention_mask"].sum()) for each in inputs)
        mean = tokens / sum(len(each["input_ids"]) for each in inputs)
        yield SweepPoint(value, mean, measure(target, systems, inputs, how, repeats))
