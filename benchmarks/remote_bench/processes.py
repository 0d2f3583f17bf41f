"""The processes of the bench `remote_sessions`: a server that verifies, and one that forks devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remote_bench.clients import Order

KEEP_SECONDS = 5.0  # that the server keeps texts of devices that are gone
_START_SECONDS = 900.0  # that a server may take to load its target


def links_of(asked: argparse.Namespace, latencies: str) -> list[tuple[float, float]]:
    """Returns the links that are asked for: milliseconds of latency and Mbit/s, each with each."""
    ways = (asked.round_trip_ms or latencies).split(",")
    return [(float(ms), float(mbit) if mbit else math.inf) for ms in ways for mbit in asked.mbit.split(",")]


@contextlib.contextmanager
def served(asked: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Runs a server in a separate process; yields its port and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_hsdraft.cli", "remote", "serve", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-sessions", "128", "--max-batch", str(asked.max_batch)]
    command += [] if asked.wait_ms is None else ["--wait-ms", str(asked.wait_ms)]
    command += ["--max-length", "2048", "--keep-seconds", str(KEEP_SECONDS)]
    command += ["--target", asked.target] if asked.target else []
    command += ["--packed"] if asked.packed else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _START_SECONDS
        while process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"the server is not there after {_START_SECONDS:g} s")
            with contextlib.suppress(OSError):
                status_of(port)
                break
            time.sleep(0.3)
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with status {process.returncode}")
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def status_of(port: int) -> dict[str, Any]:
    """Returns what a server says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as answer:
        return json.load(answer)


class Devices:
    """The process that forks devices. It restarts after a failed order."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, order: Order) -> dict[str, Any]:
        """Runs an order. Raises a RuntimeError if it has failed, a TimeoutError if it has taken too long."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("clients.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps(asdict(order)), file=process.stdin, flush=True)
            most = order.soak_seconds + order.timeout_seconds + 60.0  # an order ends by itself before
            if not select.select([process.stdout], [], [], most)[0]:
                raise TimeoutError(f"the devices say nothing for {most:g} s")
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the process of the devices has died")
            found = json.loads(line)
            if "error" in found:
                raise RuntimeError(found["error"])
            return found
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process and its devices."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
