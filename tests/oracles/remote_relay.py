"""A slow network on one machine: connections are handed on later, and only so many bytes a second."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

_CHUNK = 2**14


async def _hand_on(
    source: asyncio.StreamReader, goal: asyncio.StreamWriter, delay: float, bytes_per_second: float
) -> None:
    """Hands bytes on: each chunk takes its time on the link, and then the delay of the way."""
    loop, free = asyncio.get_running_loop(), 0.0
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(due - loop.time(), 0.0))
            goal.write(data)
            await goal.drain()
            if not data:
                return

    async def depart() -> None:
        nonlocal free
        while data := await source.read(_CHUNK):
            free = max(free, loop.time()) + len(data) / bytes_per_second
            under_way.put_nowait((free + delay, data))
            if free - loop.time() > 0.05:  # what waits at the link waits at its sender
                await asyncio.sleep(free - loop.time() - 0.05)
        under_way.put_nowait((max(free, loop.time()) + delay, b""))

    arriving = asyncio.create_task(arrive())
    try:
        await depart()
        await arriving
    finally:
        arriving.cancel()
        goal.close()


@contextlib.contextmanager
def relay(port: int, round_trip_seconds: float = 0.0, bytes_per_second: float = math.inf) -> Iterator[int]:
    """Runs a relay on a thread.

    Args:
        port: of the server, on this machine.
        round_trip_seconds: that are added to the way there and back, half to each.
        bytes_per_second: of each connection, each way.

    Yields:
        the port that stands for the server.
    """
    started = threading.Event()
    found: dict[str, Any] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        ways = (reader, back), (there, writer)
        tasks = [asyncio.create_task(_hand_on(*way, round_trip_seconds / 2, bytes_per_second)) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for each in (back, writer):
            each.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        found["port"] = server.sockets[0].getsockname()[1]
        started.set()
        await found["stop"].wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    started.wait()
    try:
        yield found["port"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join()
