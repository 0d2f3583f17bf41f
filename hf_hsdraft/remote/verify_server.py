"""The server: one target, verifying the drafts of many devices over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import http
import json
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import Subprotocol

from ..core.tensors import device_of
from ..runtime.target_limits import text_config
from .desk import Conversation, Desk, DeviceGone
from .messages import PROTOCOL, TO_SERVER, Hello, Refused, most_request
from .micro_batches import MicroBatches
from .sessions import ServerLimits, Sessions
from .tree_reader import TreeReader, bytes_of
from .weight_tables import ServedTables, weights_digest
from .wire import Message, WireError, decode, encode, log_failure, silent_logger

_LEAST_SILENCE = 1.0  # seconds after a handshake in which a connection makes no room for others


class Callers:
    """Connections before and after their handshake. Used by the event loop alone."""

    def __init__(self, limits: ServerLimits) -> None:
        self._most = limits.max_connections
        self._most_per_address = limits.max_per_address or max(limits.max_connections // 2, 1)
        self._before: dict[ServerConnection, str] = {}  # the handshake, each with its address, the oldest first
        self._silent: dict[ServerConnection, str] = {}  # since the handshake
        self._speaking: dict[ServerConnection, str] = {}
        self._since: dict[ServerConnection, float] = {}  # when each handshake ended

    def __len__(self) -> int:
        return len(self._silent) + len(self._speaking)

    def connection_class(self) -> type[ServerConnection]:
        """Returns a class whose connections are known here until their handshake has ended.

        As many may be open as after it. One too many takes the place of the oldest of the address with most of them.
        """
        callers = self

        class Counted(ServerConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                callers._before[self] = address_of(self)
                callers._make_room()

            def connection_lost(self, exc: Exception | None) -> None:
                callers._before.pop(self, None)
                super().connection_lost(exc)

        return Counted

    def has_room_for(self, connection: ServerConnection) -> bool:
        """Returns whether a connection may stay after its handshake. One that has said nothing makes room for it."""
        address = address_of(connection)
        here = sum(each == address for held in (self._silent, self._speaking) for each in held.values())
        if len(self) >= self._most or here >= self._most_per_address:
            before = time.monotonic() - _LEAST_SILENCE
            silent = {each: its for each, its in self._silent.items() if self._since[each] < before}
            dropped = _drop_one(silent, address if here >= self._most_per_address else None)
            if dropped is not None:
                self.remove(dropped)
            return dropped is not None
        return True

    def add(self, connection: ServerConnection) -> None:
        """Notes that the handshake of a connection has ended."""
        self._before.pop(connection, None)
        self._silent[connection], self._since[connection] = address_of(connection), time.monotonic()

    def spoke(self, connection: ServerConnection) -> None:
        """Notes that a connection has sent a message."""
        if address := self._silent.pop(connection, None):
            self._speaking[connection] = address

    def remove(self, connection: ServerConnection) -> None:
        for held in (self._silent, self._speaking, self._since):
            held.pop(connection, None)

    def drop_before(self) -> None:
        """Ends connections whose handshake has not ended: a server that is closed would wait for them."""
        for each in self._before:
            each.transport.abort()

    def _make_room(self) -> None:
        if len(self._before) > self._most and (dropped := _drop_one(self._before)) is not None:
            del self._before[dropped]


def _drop_one(held: Mapping[ServerConnection, str], address: str | None = None) -> ServerConnection | None:
    """Aborts the oldest connection of an address, by default of the one with most, and returns it if there is one."""
    counts = Counter(held.values())
    address = address or max(counts, key=counts.__getitem__, default=None)
    oldest = next((each for each, its in held.items() if its == address), None)
    if oldest is not None:
        oldest.transport.abort()
    return oldest


def address_of(connection: Any) -> str:
    """Returns the address of a connection's other end, without its port."""
    found = connection.transport.get_extra_info("peername")
    return str(found[0]) if isinstance(found, tuple) and found else "?"


class VerifyServer:
    """Verifies drafts of many devices by one target, a causal language model with attention layers only.

    The `tokenizer` is for devices without one; `None` takes token ids only. `token` is a bearer token that devices must
    send; empty for none. Raises a DraftingRefused if the target cannot verify for several texts at once.
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
        size, tables = token_bytes(self._reader), ServedTables(target)
        self.sessions = Sessions(self.limits, size, lambda tokens: self._batches.prompt_seconds(tokens))
        self._batches = MicroBatches(self._reader, self.limits)
        self._desk = Desk(target, tokenizer, self.sessions, self._batches, tables, longest, self._reader.vocab_size)
        rows, width = tables.shape
        self._hello = Hello(
            name[:1024],
            json.dumps(text_config(target).to_diff_dict() | {"model_type": text_config(target).model_type}),
            str(target.dtype).removeprefix("torch."),
            rows,
            width,
            tables.tied,
            tables.fingerprint,
            weights_digest(target),
            longest,
            self.limits.max_nodes,
        )
        self._callers = Callers(self.limits)

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> Server:
        """Starts to listen on a bound socket; `tls` encrypts the connections."""
        return await serve(
            self._handle,
            sock=listener,
            ssl=tls,
            subprotocols=[Subprotocol(PROTOCOL)],
            origins=[None],  # refuses pages in browsers, which send an origin
            compression=None,  # so a small message cannot expand to a large one
            max_size=most_request(self._desk.longest),
            max_queue=2,
            create_connection=self._callers.connection_class(),
            open_timeout=self.limits.hello_seconds,
            close_timeout=2.0,
            ping_interval=20.0,
            ping_timeout=20.0,
            process_request=self._admit,
            logger=silent_logger(),
            server_header=None,
        )

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Listens until it is cancelled or gets SIGTERM."""
        task = asyncio.current_task()
        with contextlib.suppress(RuntimeError):  # on systems without such signals, and on other threads
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
        with contextlib.suppress(asyncio.CancelledError):
            async with await self.start(listener, tls):
                try:
                    await self.tend()
                finally:  # while the waiting devices can still be answered
                    await asyncio.to_thread(self.close)
                    self._callers.drop_before()

    async def tend(self) -> None:
        """Drops abandoned texts forever; raises a RuntimeError once the thread that runs the target has ended."""
        while True:
            await asyncio.sleep(min(self.limits.keep_seconds / 2, 1.0))
            self.sessions.forget_old()
            if not self._batches.running:
                raise RuntimeError("the thread that runs the target has ended: the log says why")

    def close(self) -> None:
        """Ends the thread that runs the target, and answers waiting jobs."""
        self._batches.close()

    def status(self) -> dict[str, Any]:
        """Returns load, totals and limits, as served at `/status`."""
        return {
            "target": self._hello.target,
            "sessions": len(self.sessions),
            "attached": self.sessions.attached,
            "connections": len(self._callers),
            "reserved_bytes": self.sessions.reserved_bytes,
            "held_bytes": sum(bytes_of(each.text.cache) for each in self.sessions),
            "opened": self.sessions.opened,
            "refused": self.sessions.refused,
            "lost": self.sessions.lost,
            "token_bytes": self.sessions.token_bytes,
            "limits": dataclasses.asdict(self.limits),
            "batches": self._batches.status(),
        }

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answers requests that are not connections or are refused."""
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
        if not self._callers.has_room_for(connection):
            full = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections, try again later\n")
            full.headers["Retry-After"] = str(max(round(self.sessions.retry_seconds()), 1))
            return full
        return None

    def _is_authorised(self, request: Request) -> bool:
        given = [value for name, value in request.headers.raw_items() if name.lower() == "authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)

    async def _handle(self, connection: ServerConnection) -> None:
        async def send(message: Message) -> None:
            data = encode(message)
            try:
                await asyncio.wait_for(connection.send(data), self.limits.idle_seconds)
            except (TimeoutError, ConnectionClosed, OSError) as error:
                raise DeviceGone from error

        conversation = Conversation(self._desk, send, lambda: connection.state is State.OPEN)
        self._callers.add(connection)
        patience = min(self.limits.hello_seconds, self.limits.idle_seconds)
        try:
            await send(self._hello)
            while True:
                try:
                    data = await asyncio.wait_for(connection.recv(), patience)
                except TimeoutError:
                    await connection.close(1001, "nothing was said for too long")
                    break
                try:
                    message = decode(data, TO_SERVER)
                except WireError as error:
                    await send(Refused("malformed", str(error), 0.0))
                    await connection.close(1002)
                    break
                self._callers.spoke(connection)
                patience = self.limits.idle_seconds
                await conversation.answer(message)
        except (DeviceGone, ConnectionClosed, OSError):
            pass  # the device has gone; its text waits to be resumed
        except Exception as error:
            log_failure("a connection was ended", error)
            with contextlib.suppress(Exception):
                await connection.close(1011)
        finally:
            self._callers.remove(connection)
            conversation.end()


def token_bytes(reader: TreeReader) -> int:
    cache = DynamicCache()
    with torch.no_grad():
        reader.read_prompt(cache, torch.zeros(1, 4, dtype=torch.long, device=device_of(reader.target)), ())
    return bytes_of(cache) // 4


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Returns the server's TLS context, from files of a certificate chain and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context
