"""The first calls of a process whose cache holds no compiled code, beside those of plain decoding.

Plain decoding and each variant decode the same prompts in a process each, so that none disturbs or warms up another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import mul
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.markup import escape
from rich.table import Table

from ..bench.calls import BATCH, Settings, processor, timed, turn_order, until_end
from ..bench.plan import BenchPlan
from ..bench.systems import PLAIN, System, Variant, make_systems, with_options
from ..cpu.background import end_compilers
from ..generate.by_name import found_for_targets
from ..runtime.prompt_inputs import encode_batch
from ..runtime.target_loading import load_target
from ..training.files import write_json
from .pictures.bench_pictures import draw_line, with_legend
from .pictures.training_pictures import new_figure, save_figure, style

IN_A_ROW = 10
DEFINITIONS = {
    "speed-up": "seconds that plain decoding's process takes for as many tokens over seconds of the calls, all prompts",
    "first": "the same of the first call of a process",
    "worst": "the same of the worst call",
    f"worst {IN_A_ROW}": f"the same of the worst {IN_A_ROW} calls in a row",
    "packed, compiled": "number of the first call that multiplied by packed weights, that ran compiled layers",
}
Found = TypeVar("Found")


@dataclass(frozen=True)
class Pair:
    """A target and a drafter by name, loaded by every process."""

    target: str | None  # `None` for the default one
    drafter: str
    dtype: torch.dtype
    device: str = "cpu"

    def in_fresh_process(self, measure: Callable[..., Found], prompts: Sequence[Any], *given: Any) -> Found:
        """Returns `measure(target, drafter, inputs of the prompts, *given)` from a new process.

        A prompt that is a list of texts is a batch.
        """
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the new process inherits it: Ctrl-C is for this one
            try:
                found = pool.submit(self._load_and, measure, list(prompts), *given)
            finally:
                signal.signal(signal.SIGINT, before)
            try:
                return found.result()
            except KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.kill()
                raise

    def _load_and(self, measure: Callable[..., Found], prompts: Sequence[Any], *given: Any) -> Found:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        named = found_for_targets(self.drafter, self.dtype, self.device)
        target, tokenizer = load_target(self.target, self.dtype, self.device)
        drafter = named(target)
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
        texts = ([each] if isinstance(each, str) else each for each in prompts)
        encoded = [encode_batch(tokenizer, each, self.device) for each in texts]
        return measure(target, drafter, encoded, *given)


@dataclass(frozen=True)
class ColdCall:
    """A call of a process, by its place among the process's calls."""

    tokens: int  # new tokens of all rows
    seconds: float
    packed: bool = False
    compiled: bool = False
    tau: float | None = None


@dataclass
class ColdCalls:
    """The calls of each system, plain decoding first; a list for each repeat."""

    batch_size: int
    calls: dict[str, list[list[ColdCall]]]

    @property
    def complete(self) -> bool:
        """Whether each system has been timed."""
        return all(self.calls.values())

    def ratios(self, name: str) -> list[float]:
        """Speed-up of each call, from medians of seconds per token over repeats."""
        return [plain / own for plain, own in zip(self.per_token(PLAIN), self.per_token(name), strict=True)]

    def speed_up(self, name: str, begin: int = 0, end: int | None = None) -> float:
        """Of calls from `begin` to `end` together, for as many tokens on both sides."""
        tokens = [call.tokens for call in self.calls[name][0]][begin:end]
        plain, own = (self.per_token(each)[begin:end] for each in (PLAIN, name))
        return sum(map(mul, plain, tokens)) / sum(map(mul, own, tokens))

    def worst_in_a_row(self, name: str, count: int = IN_A_ROW) -> float:
        starts = range(max(len(self.calls[name][0]) - count, 0) + 1)
        return min(self.speed_up(name, start, start + count) for start in starts)

    @property
    def others(self) -> list[str]:
        """The systems besides plain decoding."""
        return [name for name in self.calls if name != PLAIN]

    def table(self) -> Table:
        table = Table(f"{self.batch_size} prompts a call" if self.batch_size > 1 else "variant", *DEFINITIONS)
        for name in self.others:
            table.add_row(escape(name), *self.row(name))
        return table

    def row(self, name: str) -> tuple[str, ...]:
        """The cells of a table, in the order of `DEFINITIONS`."""
        ratios, calls = self.ratios(name), self.calls[name][0]
        began = [
            next((str(place) for place, call in enumerate(calls, 1) if getattr(call, which)), "-")
            for which in ("packed", "compiled")
        ]
        figures = self.speed_up(name), ratios[0], min(ratios), self.worst_in_a_row(name)
        return *(f"{figure:.2f}" for figure in figures), ", ".join(began)

    def as_document(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "ratios": {name: self.ratios(name) for name in self.others},
            "summary": {name: dict(zip(DEFINITIONS, self.row(name), strict=True)) for name in self.others},
            "calls": {name: [[asdict(call) for call in each] for each in runs] for name, runs in self.calls.items()},
        }

    def per_token(self, name: str) -> list[float]:
        """Seconds per token of each call, median over repeats."""
        of_each = zip(*self.calls[name], strict=True)  # the calls of a prompt, over repeats
        return [statistics.median(call.seconds / call.tokens for call in calls) for calls in of_each]


def run_cold(plan: BenchPlan, pair: Pair, tell: Callable[[str], None]) -> list[ColdCalls]:
    """Measures the variants of a plan, for each batch size. The report is written after each process."""
    command = f"{plan.command(str(pair.dtype).removeprefix('torch.'))} --cold"
    settings = {
        "command": command,
        "processor": processor(torch.device(pair.device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    done = list[ColdCalls]()
    for size in plan.points.get(BATCH, (1,)):
        starts = range(0, len(plan.texts) - size + 1, size)
        texts = [plan.texts[start : start + size] for start in starts]
        found = ColdCalls(size, {name: [] for name in (PLAIN, *(each.text for each in plan.parsed))})
        done.append(found)
        for repeat in range(plan.repeats):
            for variant in turn_order([None, *plan.parsed], repeat):
                name = PLAIN if variant is None else variant.text
                tell(f"{name}: {len(texts)} calls of a new process, {size} prompts a call")
                found.calls[name].append(pair.in_fresh_process(time_calls, texts, variant, plan.settings))
                if plan.json_out is not None and found.complete:
                    document = {"definitions": DEFINITIONS, "settings": settings}
                    write_json(plan.json_out, {**document, "cold": [each.as_document() for each in done]})
    return done


def time_calls(
    target: Any, drafter: Any, inputs: Sequence[Any], variant: Variant | None, settings: Settings
) -> list[ColdCall]:
    """Times a call for each of the inputs, one after the other, with a new cache of compiled code."""
    [system] = [System(PLAIN)] if variant is None else make_systems([variant], target, {"": drafter})
    if system.options:
        with_options(system.drafter, system.options)
    calls = list[ColdCall]()
    with (
        tempfile.TemporaryDirectory(prefix="hsdraft-cold-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        stack.callback(end_compilers)
        os.environ["XDG_CACHE_HOME"] = str(Path(folder).resolve())
        for number, each in enumerate(inputs):
            torch.manual_seed(settings.seed + number)
            output, seconds = timed(
                target.device, target.generate, **each, **settings.generate_kwargs(), **system.generate_kwargs
            )
            start = each["input_ids"].shape[1] if not target.config.is_encoder_decoder else 1
            tokens = sum(len(until_end(row, target)) for row in output.sequences[:, start:].tolist())
            known = getattr(output, "statistics", None)
            told = () if known is None else (known.packed_weights, known.compiled_layers, known.tau)
            calls.append(ColdCall(tokens, seconds, *told))
    return calls


def draw_cold(sizes: Sequence[ColdCalls], folder: Path, stem: str = "cold") -> list[Path]:
    """Draws the milliseconds per token of each call of a process, a picture for each batch size; returns the paths."""
    paths = []
    for each in sizes:
        figure = new_figure(8.0, 4.2)
        axes = figure.subplots()
        for index, name in enumerate(each.calls):
            label = name if name == PLAIN else f"{name}: {each.speed_up(name):.2f} times as fast"
            times = [1000 * seconds for seconds in each.per_token(name)]
            draw_line(axes, index, label, range(1, len(times) + 1), times)
        batch = f", batches of {each.batch_size}" if each.batch_size > 1 else ""
        style(axes, f"Calls of a new process without compiled code{batch}", "call of the process", "ms per token")
        axes.set_ylim(bottom=0)
        paths.append(save_figure(with_legend(figure), folder / f"{stem}_{each.batch_size}.png"))
    return paths
