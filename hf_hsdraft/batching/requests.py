"""Requests of continuous batching: what was asked for, and what became of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..generate.attachment import Attachment
from .prepared import Prepared

_SHARED = ("target_forwards", "draft_seconds", "verify_seconds", "commit_seconds")


@dataclass(frozen=True)
class FinishedText:
    """A request that is done.

    Attributes:
        index: number of the request, in the order of `submit`.
        output: what `generate()` would return, without a cache; what there is of a cancelled text; None after an error.
        error: what `generate()` would raise.
        statistics: its own, with every forward that it was in and the time from its prompt to its end; None where
            nothing could be drafted.
        cancelled: whether it ended by `cancel`.
        reused_tokens: number of tokens of its prompt that an earlier one had read.
        refusal: why nothing was drafted, where that turned out after its prompt.
    """

    index: int
    output: Any
    error: Exception | None = None
    statistics: DraftStatistics | None = None
    cancelled: bool = False
    reused_tokens: int = 0
    refusal: str = ""


class Tally:
    """Adds up what a running batch does: a round counts once, however many texts are in it.

    Attributes:
        statistics: of the requests that are done, and of all forwards until then.
    """

    def __init__(self, attachment: Attachment | None) -> None:
        self.statistics, self._attachment = DraftStatistics.sum(), attachment
        self._since: dict[str, Any] = dict.fromkeys((*_SHARED, "total_seconds"), 0)  # the last request was counted

    def took(self, done: DraftStatistics) -> None:
        """Counts forwards, and the parts of a round."""
        for name in _SHARED:
            self._since[name] += getattr(done, name)

    def ended(self, done: list[FinishedText], seconds: float) -> list[FinishedText]:
        """Counts requests that are done, for the attachment too, and `seconds` in which all texts grew."""
        self._since["total_seconds"] += seconds
        for each in done:
            if each.refusal and self._attachment is not None:
                self._attachment.step_aside(each.refusal)
            if each.statistics is None or each.error is not None:
                continue
            counted = replace(each.statistics, **self._since)
            self._since = dict.fromkeys(self._since, 0)
            self.statistics += counted
            if self._attachment is not None:
                self._attachment.count(counted, counted.total_seconds, each.statistics)
        return done


@dataclass(frozen=True, eq=False)
class Request:
    """A request as submitted."""

    index: int
    arguments: Mapping[str, Any]
    seed: int

    @contextlib.contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Draws inside by the request's seed, then restores torch's generators."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield

    def alone(self, prepared: Prepared, tally: Tally, device: torch.device) -> FinishedText:
        """Decodes it as a separate call."""
        statistics, refusals, began = DraftStatistics(), list[DraftingRefused](), time.perf_counter()
        with self.seeded(device):
            try:
                output = prepared.alone(statistics, refusals.append)
            except Exception as error:
                return FinishedText(self.index, None, error)
        tally.took(statistics)
        statistics.total_seconds = time.perf_counter() - began
        if refusals or not statistics.target_forwards:
            return FinishedText(self.index, output, refusal=refusals[0].of_attached() if refusals else "")
        return FinishedText(self.index, output, statistics=statistics)
