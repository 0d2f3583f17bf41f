"""The texts that a server holds, and the limits on them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..core.tuning import TUNING
from .messages import MOST_LENGTH, MOST_NODES, Accepted, Refused
from .verified_text import VerifiedText


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes on.

    Attributes:
        max_sessions: texts at a time.
        max_bytes: of the keys and values that these may come to have.
        max_connections: connections at a time.
        idle_seconds: after which a connection that says nothing is closed, and a text without new drafts forgotten.
        keep_seconds: that a text is kept after its connection has ended.
        max_length: tokens of a text.
        max_nodes: of a draft tree beside the root.
        max_batch: texts in a forward.
        max_columns: texts in a forward times nodes of the largest tree, roots counted; devices are told their share.
        wait_seconds: that a batch waits for texts that are away; `None` to wait up to half of the last forward for
            texts that usually come back so soon.
        piece: tokens of a prompt that are read at once.
        prompt_seconds: that reading the prompts which wait may take before another text is refused.
    """

    max_sessions: int = 64
    max_bytes: int = 2**31
    max_connections: int = 256
    idle_seconds: float = 120.0
    keep_seconds: float = 30.0
    max_length: int = 4096
    max_nodes: int = 64
    max_batch: int = 32
    max_columns: int = 256
    wait_seconds: float | None = None
    piece: int = 512
    prompt_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "wait_seconds" and value in (None, 0):
                continue
            if value is None or value <= 0:
                raise ValueError(f"{name}={value} is invalid: expected a positive number")
        for name, most in (("max_length", MOST_LENGTH), ("max_nodes", min(MOST_NODES, self.max_columns) - 1)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"{name}={getattr(self, name)} is invalid: expected at most {most}, where max_columns is "
                    f"{self.max_columns}"
                )


class Overloaded(Exception):
    """There is no place for another text now.

    Attributes:
        retry_seconds: when there may be one.
    """

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


@dataclass
class ServedSession:
    """A text and the connection that it is gone on with.

    Attributes:
        text: the text.
        size: bytes that its keys and values and the hidden states of a message may come to have.
        name: by which it is resumed.
        number: of the last draft that was verified; 0 before the first one.
        answer: what was said to that draft.
        verifying: while a draft of it is being verified.
        holder: the connection that goes on with it; `None` after that has ended.
        began: when it was opened.
        used: when a device last went on with it.
        left: when its connection ended.
    """

    text: VerifiedText
    size: int
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    number: int = 0
    answer: Accepted | None = None
    verifying: asyncio.Future[Accepted | Refused] | None = None
    holder: object | None = None
    began: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    left: float = 0.0

    def finish(self) -> None:
        """Frees what only a text needs that goes on."""
        self.text.release()
        self.size = 0


class Sessions:
    """All texts of a server. Used by its event loop alone.

    Args:
        limits: on them.
        token_bytes: size of keys and values of a token.
        prompt_seconds: returns how long so many tokens of prompts take to read.
    """

    def __init__(self, limits: ServerLimits, token_bytes: int, prompt_seconds: Callable[[int], float]) -> None:
        self.limits, self.token_bytes, self._prompt_seconds = limits, token_bytes, prompt_seconds
        self._by_name: dict[str, ServedSession] = {}
        self._lifetime = 5.0  # seconds that a text is held, a running mean
        self.attached = 0  # texts that a connection goes on with
        self.opened = self.refused = self.lost = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[ServedSession]:
        return iter(list(self._by_name.values()))

    @property
    def reserved_bytes(self) -> int:
        """Size that all texts may come to have."""
        return sum(each.size for each in self._by_name.values())

    def open(self, text: VerifiedText, holder: object) -> ServedSession:
        """Takes a text on.

        Raises:
            Overloaded: there is no place for it.
            ValueError: there never is.
        """
        tokens = text.most_tokens()
        size = (tokens + TUNING.spare_tokens + tokens // TUNING.spare_part) * self.token_bytes  # with room to grow into
        size += 2 * min(tokens, self.limits.piece) * text.position_bytes  # of a piece, as it is read and as it is sent
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
        """Drops texts whose connections have ended, the longest gone first, as far as a new one needs their room."""
        gone = sorted((each for each in self if each.holder is None), key=lambda each: each.left)
        count, room, dropped = len(self), self.limits.max_bytes - self.reserved_bytes, 0
        while count >= self.limits.max_sessions or room < size:
            if dropped == len(gone):  # nothing is dropped where that does not help
                self.refused += 1
                raise Overloaded(
                    f"the server verifies for {len(self)} texts and has no room for another one", self.retry_seconds()
                )
            count, room, dropped = count - 1, room + gone[dropped].size, dropped + 1
        for each in gone[:dropped]:
            self.lost += 1
            self.remove(each)

    def retry_seconds(self) -> float:
        """When one of the texts may have ended."""
        return min(max(self._lifetime / max(len(self), 1), 0.2), 30.0)

    def find(self, name: str) -> ServedSession | None:
        """Returns a text by its name."""
        return self._by_name.get(name)

    def attach(self, session: ServedSession, holder: object) -> None:
        """Lets a connection go on with a text; another one that did so does no more."""
        self.attached += session.holder is None
        session.holder, session.used = holder, time.monotonic()

    def leave(self, session: ServedSession, holder: object) -> None:
        """The connection has ended: the text waits for it to come back, unless it is decoded plainly."""
        if session.holder is not holder:
            return
        if session.text.plain:  # its tokens are sent as they come: the device opens it again with those that it has
            self.lost += 1
            self.remove(session)
            return
        session.holder, session.left = None, time.monotonic()
        self.attached -= 1

    def remove(self, session: ServedSession) -> None:
        """Forgets a text."""
        if self._by_name.pop(session.name, None) is None:
            return
        self.attached -= session.holder is not None
        session.holder = None
        self._lifetime += 0.1 * (time.monotonic() - session.began - self._lifetime)

    def forget_old(self) -> None:
        """Forgets the texts whose connections have been gone too long, and those that no draft has come for."""
        now = time.monotonic()
        for each in self:
            gone = each.holder is None and now - each.left > self.limits.keep_seconds
            idle = each.verifying is None and not each.text.waiting and now - each.used > self.limits.idle_seconds
            if gone or idle:
                self.lost += 1
                self.remove(each)
