"""Tokens/s of batches with a drafter and by plain `generate()`, in turn, for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..drafters.base.protocol import Drafter
from .calls import Settings
from .run import measure
from .summary import DEFINITIONS, Summary, summarise
from .sweeps import padded_batches
from .systems import PLAIN, System
from .tables import figures_table

_DRAFTED = "drafted"


@dataclass(frozen=True)
class Throughput:
    """Measurements of one batch size; `rows` is the total number of rows."""

    batch_size: int
    plain_speed: float
    drafted: Summary
    rows: int

    def cells(self) -> list[str]:
        found = self.drafted
        figures = f"{self.plain_speed:.0f}", f"{found.speed_up:.2f}", f"{found.tau:.2f}"
        return [str(self.batch_size), *figures, f"{found.identical}/{self.rows}"]


def run_throughput(
    target: Any,
    tokenizer: Any,
    drafter: Drafter,
    prompts: Sequence[str],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    calls: int,
) -> list[Throughput]:
    """Measures greedy decoding of `calls` left-padded batches of each size. Prompts of similar length go together.

    Raises a ValueError if there are fewer prompts than a batch needs.
    """
    system = System(_DRAFTED, {"assistant_model": drafter}, drafter, ours=True)
    results = []
    for size in batch_sizes:
        batches = padded_batches(tokenizer, prompts[: size * calls], size, target.device)
        if not batches:
            raise ValueError(f"a batch of {size} needs as many prompts; there are {len(prompts)}")
        runs = measure(target, [system], batches, Settings(max_new_tokens)).runs
        plain, drafted = (summarise(runs[name], runs[PLAIN]) for name in (PLAIN, _DRAFTED))
        results.append(Throughput(size, plain.tokens_per_second, drafted, size * len(batches)))
    return results


def print_throughput(results: Sequence[Throughput], console: Console) -> None:
    columns = ("batch", "plain tokens/s", "speed-up", "tau", "rows with the same text")
    console.print(figures_table(columns, map(Throughput.cells, results)))
    for name in ("tau", "speed_up"):
        console.print(f"{name}: {DEFINITIONS[name]}", style="dim", highlight=False)
