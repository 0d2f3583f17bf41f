"""The connections of a server: limits on all and on each address, and silent ones make room for new ones."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.server import ServerConnection

from .sessions import ServerLimits

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
