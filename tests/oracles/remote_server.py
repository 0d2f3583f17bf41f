"""A server that verifies, and a slow network before it, each on a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from hf_hsdraft.remote.verify_server import VerifyServer

_CHUNK = 2**14


@contextlib.contextmanager
def _on_a_thread(run: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Runs a coroutine on a thread, and cancels it at the end."""
    started, running = threading.Event(), list[Any]()

    async def begun() -> None:
        running.extend([asyncio.get_running_loop(), asyncio.current_task()])
        started.set()
        await run()

    def begin() -> None:
        with contextlib.suppress(RuntimeError, asyncio.CancelledError):  # the thread that runs the target has ended
            asyncio.run(begun())

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    started.wait()
    loop, task = running
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


@contextlib.contextmanager
def in_background(server: VerifyServer, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Runs a server on a thread, on the loopback interface; yields its port."""
    listener = socket.create_server(("127.0.0.1", port))
    with contextlib.closing(server), _on_a_thread(lambda: server.run(listener, tls)):
        yield listener.getsockname()[1]


@contextlib.contextmanager
def relay(port: int, round_trip_seconds: float = 0.0, bytes_per_second: float = math.inf) -> Iterator[int]:
    """Runs a relay to a server's port on a thread; yields the port that stands for the server.

    Half of `round_trip_seconds` is added to each way; `bytes_per_second` are of each connection, each way.
    """

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

    listener = socket.create_server(("127.0.0.1", 0))

    async def run() -> None:
        server = await asyncio.start_server(connected, sock=listener)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    with _on_a_thread(run):
        yield listener.getsockname()[1]


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
