"""What the arguments of the bench `remote_sessions` ask for."""

from __future__ import annotations

import argparse
import math
from typing import Any

from remote_bench.clients import Order


def options_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `generate()`."""
    return {"max_new_tokens": asked.max_new_tokens, "do_sample": asked.sample}


def order_of(asked: argparse.Namespace, port: int, drafter: str, count: int, prompts: list[list[int]]) -> Order:
    """Returns what devices do for a row, or for a soak."""
    url, options, seconds = f"http://127.0.0.1:{port}", options_of(asked), asked.soak_minutes * 60
    limits = asked.most_taps, seconds, asked.timeout_seconds, asked.stuck_seconds
    return Order(url, drafter, count, prompts, asked.texts, options, *limits)


def links_of(asked: argparse.Namespace, latencies: str) -> list[tuple[float, float]]:
    """Returns the links that are asked for: milliseconds of latency and Mbit/s, each with each."""
    ways = (asked.round_trip_ms or latencies).split(",")
    return [(float(ms), float(mbit) if mbit else math.inf) for ms in ways for mbit in asked.mbit.split(",")]
