"""Figures of a server in Prometheus' format, for `GET /metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from transformers.cli.serving.utils import _GenerationCancelled

from ..generate.attachment import Attachment

_FIRST = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_BETWEEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """Counts of one server.

    Args:
        waiting, running: return the number of requests that wait, and of those that are decoded.
        reused: returns the number of tokens of prompts that were not read again.
        attachment: what was drafted; None without a drafter.
    """

    def __init__(
        self,
        waiting: Callable[[], int],
        running: Callable[[], int],
        reused: Callable[[], int],
        attachment: Attachment | None = None,
    ) -> None:
        self._registry = own = CollectorRegistry()
        self.requests = Counter("hsdraft_requests", "Requests that are done, by outcome", ["outcome"], registry=own)
        self.tokens = Counter("hsdraft_tokens", "New tokens of answers", registry=own)
        self.first = Histogram(
            "hsdraft_first_token_seconds", "Time from a request to its first token", registry=own, buckets=_FIRST
        )
        self.between = Histogram(
            "hsdraft_between_tokens_seconds",
            "Mean time between the tokens of an answer",
            registry=own,
            buckets=_BETWEEN,
        )
        Gauge("hsdraft_waiting", "Requests that wait", registry=own).set_function(waiting)
        Gauge("hsdraft_running", "Requests that are decoded", registry=own).set_function(running)
        known = Gauge("hsdraft_reused_prompt_tokens", "Tokens of prompts that were not read again", registry=own)
        known.set_function(reused)
        tau = Gauge("hsdraft_tau", "Tokens per target forward and row, bonus token included", registry=own)
        tau.set_function(lambda: attachment.statistics.tau if attachment is not None else 1.0)

    def exported(self) -> bytes:
        """Returns all figures as text."""
        return generate_latest(self._registry)


class AnswerClock:
    """Times of one answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._begin = metrics, time.perf_counter()
        self._first, self._tokens = 0.0, 0

    def note(self, tokens: int) -> None:
        """Notes new tokens."""
        if not tokens:
            return
        if not self._tokens:
            self._first = time.perf_counter()
            self._metrics.first.observe(self._first - self._begin)
        self._tokens += tokens
        self._metrics.tokens.inc(tokens)

    def end(self, error: Any) -> None:
        """Notes the end, by the error if there was one."""
        cancelled = isinstance(error, _GenerationCancelled | asyncio.CancelledError)
        self._metrics.requests.labels("cancelled" if cancelled else "done" if error is None else "error").inc()
        if error is None and self._tokens > 1:
            self._metrics.between.observe((time.perf_counter() - self._first) / (self._tokens - 1))
