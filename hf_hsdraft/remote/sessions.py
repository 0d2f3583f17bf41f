"""The texts that a server holds, and the limits on them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..core.checks import demand
from ..core.tuning import SPARE_PART, SPARE_TOKENS
from .messages import MOST_LENGTH, MOST_NODES, Accepted, Refused
from .verified_text import VerifiedText


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server."""

    max_sessions: int = 64  # texts at a time
    max_bytes: int = 2**31  # of their keys and values at full length
    max_connections: int = 256  # connections at a time
    max_per_address: int | None = None  # connections of one address; `None` for half of `max_connections`
    hello_seconds: float = 10.0  # after which a connection is closed that has said nothing yet
    idle_seconds: float = 120.0  # after which a silent connection is closed, and a text without new drafts dropped
    keep_seconds: float = 30.0  # that a text is kept after its connection has ended
    max_length: int = 4096  # tokens of a text
    max_nodes: int = 64  # of a draft tree, without the root
    max_batch: int = 32  # texts in a forward
    # texts in a forward times nodes of the largest tree, roots included; each device gets its share
    max_columns: int = 256
    # that a batch waits for texts that are away; `None` to wait up to half the duration of the last forward for texts
    # that usually return so soon
    wait_seconds: float | None = None
    piece: int = 512  # tokens of a prompt that are read at once
    prompt_seconds: float = 30.0  # estimated time for all waiting prompts above which new texts are refused

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_default = (name, value) in (("wait_seconds", None), ("wait_seconds", 0), ("max_per_address", None))
            demand(is_default or (value is not None and value > 0), name, value, "expected a positive number")
        for name, most in (("max_length", MOST_LENGTH), ("max_nodes", min(MOST_NODES, self.max_columns) - 1)):
            wanted = f"expected at most {most}, where max_columns is {self.max_columns}"
            demand(getattr(self, name) <= most, name, getattr(self, name), wanted)


class Overloaded(Exception):
    """There is no room for another text now; there may be in `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


@dataclass
class ServedSession:
    """A text and its current connection."""

    text: VerifiedText
    size: int  # bytes reserved: keys and values at full length, and the hidden states of a message
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    number: int = 0  # of the last verified draft; 0 before the first one
    answer: Accepted | None = None  # to that draft
    verifying: asyncio.Future[Accepted | Refused] | None = None  # set while a draft of it is being verified
    holder: object | None = None  # the current connection; `None` after it has ended
    began: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)  # when a device last used it
    left: float = 0.0  # when its connection ended

    def finish(self) -> None:
        """Frees what only an unfinished text needs."""
        self.text.release()
        self.size = 0


class Sessions:
    """All texts of a server. Used by its event loop alone; `prompt_seconds` estimates how long prompts take to read."""

    def __init__(self, limits: ServerLimits, token_bytes: int, prompt_seconds: Callable[[int], float]) -> None:
        self.limits, self._prompt_seconds = limits, prompt_seconds
        self.token_bytes = token_bytes  # keys and values of a token
        self._by_name: dict[str, ServedSession] = {}
        self._lifetime = 5.0  # seconds that a text is held, a running mean
        self.attached = 0  # texts with a connection
        self.opened = self.refused = self.lost = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[ServedSession]:
        return iter(list(self._by_name.values()))

    @property
    def reserved_bytes(self) -> int:
        """Size of all texts at full length."""
        return sum(each.size for each in self._by_name.values())

    def open(self, text: VerifiedText, holder: object) -> ServedSession:
        """Adds a text; raises `Overloaded` if there is no room now, or a ValueError if it exceeds the limits."""
        tokens = text.most_tokens()
        size = (tokens + SPARE_TOKENS + tokens // SPARE_PART) * self.token_bytes  # with spare room
        size += 2 * min(tokens, self.limits.piece) * text.position_bytes  # of a piece, as read and as sent
        if size > self.limits.max_bytes:
            raise ValueError(
                f"the text may come to have {size >> 20} MiB of keys, values and hidden states: this server has "
                f"{self.limits.max_bytes >> 20}; ask for fewer tokens by max_new_tokens"
            )
        waits = self._prompt_seconds(sum(each.text.waiting for each in self))
        if waits > self.limits.prompt_seconds:
            self.refused += 1
            raise Overloaded(
                f"the server has prompts of {waits:.0f} s to read", min(waits - self.limits.prompt_seconds + 0.2, 30.0)
            )
        self._make_room(size)
        session = ServedSession(text, size)
        self._by_name[session.name] = session
        self.opened += 1
        self.attach(session, holder)
        return session

    def _make_room(self, size: int) -> None:
        """Drops texts whose connections have ended, the longest gone first, as far as a new text needs their room."""
        gone = sorted((each for each in self if each.holder is None), key=lambda each: each.left)
        count, room, dropped = len(self), self.limits.max_bytes - self.reserved_bytes, 0
        while count >= self.limits.max_sessions or room < size:
            if dropped == len(gone):  # dropping would not help
                self.refused += 1
                raise Overloaded(
                    f"the server verifies for {len(self)} texts and has no room for another one", self.retry_seconds()
                )
            count, room, dropped = count - 1, room + gone[dropped].size, dropped + 1
        for each in gone[:dropped]:
            self.lost += 1
            self.remove(each)

    def retry_seconds(self) -> float:
        """Estimates the seconds until a text ends."""
        return min(max(self._lifetime / max(len(self), 1), 0.2), 30.0)

    def find(self, name: str) -> ServedSession | None:
        return self._by_name.get(name)

    def attach(self, session: ServedSession, holder: object) -> None:
        """Makes a connection the text's holder, in place of any other."""
        self.attached += session.holder is None
        session.holder, session.used = holder, time.monotonic()

    def leave(self, session: ServedSession, holder: object) -> None:
        """Handles the end of a connection: its text waits to be resumed, unless it is decoded plainly."""
        if session.holder is not holder:
            return
        if session.text.plain:  # tokens are sent as they come: the device reopens it with those it has
            self.lost += 1
            self.remove(session)
            return
        session.holder, session.left = None, time.monotonic()
        self.attached -= 1

    def remove(self, session: ServedSession) -> None:
        if self._by_name.pop(session.name, None) is None:
            return
        self.attached -= session.holder is not None
        session.holder = None
        self._lifetime += 0.1 * (time.monotonic() - session.began - self._lifetime)

    def forget_old(self) -> None:
        """Drops texts without a connection for `keep_seconds`, and texts without drafts for `idle_seconds`."""
        now = time.monotonic()
        for each in self:
            gone = each.holder is None and now - each.left > self.limits.keep_seconds
            idle = each.verifying is None and not each.text.waiting and now - each.used > self.limits.idle_seconds
            if gone or idle:
                self.lost += 1
                self.remove(each)
