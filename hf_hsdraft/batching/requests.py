"""Requests of continuous batching: what was asked for, and what became of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.statistics import DraftStatistics
from .prepared import Prepared


@dataclass(frozen=True)
class FinishedText:
    """A request that is done.

    Attributes:
        index: number of the request, in the order of `submit`.
        output: what `generate()` would return, without a cache; what there is of a cancelled text; None after an error.
        error: what `generate()` would raise.
        statistics: None where nothing could be drafted.
        cancelled: whether it ended by `cancel`.
        reused_tokens: number of tokens of its prompt that an earlier one had read.
    """

    index: int
    output: Any
    error: Exception | None = None
    statistics: DraftStatistics | None = None
    cancelled: bool = False
    reused_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Request:
    """A request as submitted."""

    index: int
    arguments: Mapping[str, Any]
    seed: int

    @contextlib.contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Draws inside by the request's seed, and afterwards goes on where torch's generators were."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield

    def alone(self, prepared: Prepared, device: torch.device) -> FinishedText:
        """Decodes it as a call of its own."""
        statistics = DraftStatistics()
        with self.seeded(device):
            try:
                output = prepared.alone(statistics)
            except Exception as error:
                return FinishedText(self.index, None, error)
        return FinishedText(self.index, output, None, statistics if statistics.target_forwards else None)
