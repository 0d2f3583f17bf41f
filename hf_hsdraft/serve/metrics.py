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
    """Counts of one server, and what its `decoder` does when they are asked for."""

    def __init__(self, decoder: Any) -> None:
        self._registry = own = CollectorRegistry()
        self.requests = Counter("hsdraft_requests", "Requests that are done, by outcome", ["outcome"], registry=own)
        self.tokens = Counter("hsdraft_tokens", "New tokens of answers", registry=own)
        first, between = "Time from a request to its first token", "Mean time between the tokens of an answer"
        self.first = Histogram("hsdraft_first_token_seconds", first, registry=own, buckets=_FIRST)
        self.between = Histogram("hsdraft_between_tokens_seconds", between, registry=own, buckets=_BETWEEN)
        attachment: Attachment | None = decoder.attachment
        current: dict[tuple[str, str], Callable[[], float]] = {
            ("waiting", "Requests that wait"): lambda: decoder.waiting,
            ("running", "Requests that are decoded"): lambda: decoder.running,
            ("reused_prompt_tokens", "Tokens of prompts that were not read again"): lambda: decoder.reused_tokens,
            ("tau", "Tokens per target forward and row, bonus token included"): lambda: (
                1.0 if attachment is None else attachment.statistics.tau
            ),
        }
        for (name, meaning), value in current.items():
            Gauge(f"hsdraft_{name}", meaning, registry=own).set_function(value)

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
