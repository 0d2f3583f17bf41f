"""The soak of the bench `remote_sessions`: devices decode while they are killed."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from oracles.remote_server import relay

from hf_hsdraft.bench.calls import resident_bytes
from remote_bench.clients import Order
from remote_bench.plain import Plain
from remote_bench.processes import KEEP_SECONDS, Devices, links_of, status_of


def soaked(asked: argparse.Namespace, plain: Plain, port: int, pid: int) -> dict[str, Any]:
    """Lets devices decode while they are killed; watches the server's memory, and each device's last tokens."""
    devices, memory = Devices(), list[float]()
    drafter, count = asked.drafter[-1], max(asked.sessions)
    milliseconds, mbit = links_of(asked, "0")[0]
    with contextlib.ExitStack() as stack:
        is_slow = milliseconds or not math.isinf(mbit)
        there = stack.enter_context(relay(port, milliseconds / 1e3, mbit * 125_000)) if is_slow else port
        stack.callback(devices.close)
        order = Order.of(asked, there, drafter, count, plain.prompts)
        began = time.monotonic()
        working = stack.enter_context(ThreadPoolExecutor(1)).submit(devices.run, order)
        while not working.done():
            with contextlib.suppress(NotYet):
                working.exception(10.0)
            status = status_of(port)
            memory.append((resident_bytes(pid) or 0) / 2**20)
            print(
                f"{time.monotonic() - began:6.0f} s  {memory[-1]:7.1f} MiB  {status['sessions']:3} texts  "
                f"{status['attached']:3} attached  {status['lost']:4} lost  {status['batches']['tokens']:7} tokens",
                flush=True,
            )
        found = working.result()
    time.sleep(KEEP_SECONDS + 2.0)
    status, third = status_of(port), max(len(memory) // 3, 1)
    wrong = sum(tokens != plain.texts[int(which)] for which, tokens in found["first"].items())
    return {
        "texts": found["texts"],
        "kills": found["kills"],
        "wrong": found["wrong"] + wrong,
        "stuck": found["stuck"],
        "failures": found["failures"],
        "server_failures": status["batches"]["failures"],
        "left_sessions": status["sessions"],
        "left_connections": status["connections"],
        "left_bytes": status["reserved_bytes"] + status["held_bytes"],
        "first_third_mebibytes": max(memory[:third]),
        "last_third_mebibytes": max(memory[-third:]),
    }
