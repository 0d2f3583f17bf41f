"""The server: one target, verifying the drafts of many devices over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import http
import json
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import torch
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import Subprotocol

from ..target.target_limits import text_config
from .desk import Conversation, Desk
from .joined_cache import bytes_of, empty_cache
from .messages import PROTOCOL, TO_SERVER, Hello, Refused, most_request
from .micro_batches import MicroBatches
from .sessions import ServerLimits, Sessions
from .tree_reader import TreeReader
from .verify_logging import silent_logger
from .weight_tables import ServedTables
from .wire import Message, WireError, decode, encode

logger = logging.getLogger(__name__)


class VerifyServer:
    """Verifies drafts of many devices by one target.

    Args:
        target: the model; a causal language model whose layers all are attention.
        tokenizer: of the target, for devices without one; `None` takes token ids only.
        name: what the target is called.
        limits: what the server takes on.
        token: devices have to send it as a bearer token; empty for none.
        packed_weights: see `TreeReader`.

    Raises:
        DraftingRefused: the target cannot verify for several texts at once.
    """

    def __init__(
        self,
        target: Any,
        tokenizer: Any = None,
        name: str = "",
        limits: ServerLimits | None = None,
        token: str = "",
        packed_weights: bool = False,
    ) -> None:
        self.limits = limits or ServerLimits()
        self._token = token.encode()
        self._reader = TreeReader(target, packed_weights)
        longest = min(self._reader.longest, self.limits.max_length)
        self.sessions = Sessions(self.limits, token_bytes(self._reader))
        self._batches = MicroBatches(
            self._reader,
            self.limits.max_batch,
            self.limits.wait_seconds,
            lambda: self.sessions.attached,
            min(self.limits.piece, longest),
        )
        tables = ServedTables(target)
        self._desk = Desk(target, tokenizer, self.sessions, self._batches, tables, longest)
        rows, width = tables.shape
        self._hello = Hello(
            name[:1024],
            json.dumps(text_config(target).to_diff_dict() | {"model_type": text_config(target).model_type}),
            str(target.dtype).removeprefix("torch."),
            rows,
            width,
            tables.tied,
            tables.fingerprint,
            longest,
            self.limits.max_nodes,
        )
        self._connections = 0

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> Server:
        """Begins to listen.

        Args:
            listener: bound to an address.
            tls: for encrypted connections.
        """
        return await serve(
            self._handle,
            sock=listener,
            ssl=tls,
            subprotocols=[Subprotocol(PROTOCOL)],
            origins=[None],  # pages of a browser name theirs: they have no business here
            compression=None,  # a small message cannot become a large one
            max_size=most_request(self._desk.longest),
            max_queue=2,
            open_timeout=10.0,
            close_timeout=2.0,
            ping_interval=20.0,
            ping_timeout=20.0,
            process_request=self._admit,
            logger=silent_logger(),
            server_header=None,
        )

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Listens until it is cancelled, or the process is told to end."""
        task = asyncio.current_task()
        with contextlib.suppress(NotImplementedError):  # on systems without such signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
        with contextlib.suppress(asyncio.CancelledError):
            async with await self.start(listener, tls):
                await self.tend()

    async def tend(self) -> None:
        """Forgets texts whose devices do not come back. Never returns."""
        while True:
            await asyncio.sleep(min(self.limits.keep_seconds / 2, 1.0))
            self.sessions.forget_old()

    def close(self) -> None:
        """Ends the thread that runs the target."""
        self._batches.close()

    def status(self) -> dict[str, Any]:
        """Returns what the server holds and has done."""
        return {
            "target": self._hello.target,
            "sessions": len(self.sessions),
            "attached": self.sessions.attached,
            "connections": self._connections,
            "reserved_bytes": self.sessions.reserved_bytes,
            "held_bytes": sum(bytes_of(each.text.cache) for each in self.sessions),
            "opened": self.sessions.opened,
            "refused": self.sessions.refused,
            "lost": self.sessions.lost,
            "token_bytes": self.sessions.token_bytes,
            "limits": dataclasses.asdict(self.limits),
            "batches": dataclasses.asdict(self._batches.statistics),
        }

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answers requests that are no connection, or may not be one."""
        if self._token and not self._is_authorised(request):
            refusal = connection.respond(
                http.HTTPStatus.UNAUTHORIZED, "a bearer token is needed, or this one is wrong\n"
            )
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        path = request.path.partition("?")[0]
        if path == "/status":
            answer = connection.respond(http.HTTPStatus.OK, json.dumps(self.status()))
            del answer.headers["Content-Type"]
            answer.headers["Content-Type"] = "application/json"
            return answer
        if path != "/":
            return connection.respond(http.HTTPStatus.NOT_FOUND, "there are / and /status\n")
        if self._connections >= self.limits.max_connections:
            full = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections, try again later\n")
            full.headers["Retry-After"] = str(max(round(self.sessions.retry_seconds()), 1))
            return full
        return None

    def _is_authorised(self, request: Request) -> bool:
        given = [value for name, value in request.headers.raw_items() if name.lower() == "authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)

    async def _handle(self, connection: ServerConnection) -> None:
        """Serves one connection until it ends."""

        async def send(message: Message) -> None:
            await asyncio.wait_for(connection.send(encode(message)), self.limits.idle_seconds)

        conversation = Conversation(self._desk, send, lambda: connection.state is State.OPEN)
        self._connections += 1
        try:
            await send(self._hello)
            while True:
                try:
                    data = await asyncio.wait_for(connection.recv(), self.limits.idle_seconds)
                except asyncio.TimeoutError:
                    await connection.close(1001, "nothing was said for too long")
                    break
                try:
                    message = decode(data, TO_SERVER)
                except WireError as error:
                    await send(Refused("malformed", str(error), 0.0))
                    await connection.close(1002)
                    break
                await conversation.answer(message)
        except (ConnectionClosed, asyncio.TimeoutError, OSError):
            pass  # the device has gone; its text waits for it
        except Exception as error:
            logger.warning("a connection was ended by %s", type(error).__name__)
            with contextlib.suppress(Exception):
                await connection.close(1011)
        finally:
            self._connections -= 1
            conversation.end()


def token_bytes(reader: TreeReader) -> int:
    """Returns the size of keys and values of one token."""
    cache = empty_cache()
    with torch.no_grad():
        reader.read_prompt(cache, torch.zeros(1, 4, dtype=torch.long, device=reader.target.device), ())
    return bytes_of(cache) // 4


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Returns what encrypts the connections of a server, by files of a certificate chain and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


@contextlib.contextmanager
def in_background(server: VerifyServer, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Runs a server on a thread, at this machine's loopback; gives its port."""
    started: threading.Event = threading.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", port))
        listening = await server.start(listener, tls)
        found.update(loop=asyncio.get_running_loop(), port=listening.sockets[0].getsockname()[1])
        found["stop"] = stop = asyncio.Event()
        tending = asyncio.create_task(server.tend())
        started.set()
        async with listening:
            await stop.wait()
        tending.cancel()

    def begin() -> None:
        try:
            asyncio.run(run())
        except Exception as error:
            found["error"] = error
        started.set()

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    started.wait()
    if "error" in found:
        raise found["error"]
    try:
        yield found["port"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join()
        server.close()
