"""A server that verifies, on a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from hf_hsdraft.remote.verify_server import VerifyServer


@contextlib.contextmanager
def in_background(server: VerifyServer, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Runs a server on a thread, on the loopback interface; yields its port."""
    listener, started = socket.create_server(("127.0.0.1", port)), threading.Event()
    running: list[Any] = []

    async def run() -> None:
        running.extend([asyncio.get_running_loop(), asyncio.current_task()])
        started.set()
        await server.run(listener, tls)

    def begin() -> None:
        with contextlib.suppress(RuntimeError):  # the thread that runs the target has ended
            asyncio.run(run())

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    started.wait()
    loop, task = running
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        server.close()
