"""Answers the messages of one connection, lookups included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from .messages import (
    PIECE_BYTES,
    Accepted,
    Close,
    Decode,
    Draft,
    Encode,
    Open,
    Opened,
    Refused,
    Resume,
    Resumed,
    RowData,
    Rows,
    Taps,
    Text,
    Tokens,
    packed_ints,
    unpacked_ints,
    unpacked_tree,
)
from .micro_batches import Job, MicroBatches, Verified
from .sessions import Overloaded, ServedSession, Sessions
from .verified_text import VerifiedText
from .weight_tables import ServedTables
from .wire import MOST_TEXT, Message, WireError, log_failure
from .workers import on_own_thread

Send = Callable[[Message], Awaitable[None]]


class DeviceGone(Exception): ...


@dataclass(frozen=True)
class Desk:
    """State that all connections of a server share, and their lookups; `tables` are the rows that drafters borrow."""

    target: Any
    tokenizer: Any
    sessions: Sessions
    batches: MicroBatches
    tables: ServedTables
    longest: int
    vocab_size: int
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)  # tokenizers are not thread-safe
    steps: asyncio.Lock = field(default_factory=asyncio.Lock)  # one step at a time, in the order of asking

    async def opened(self, message: Open, is_open: Callable[[], bool]) -> VerifiedText:
        """Prepares a text in short steps, so that others take turns with one that was sampled for long.

        Raises `DeviceGone` once its device has left.
        """
        text = await self._step(VerifiedText, self.target, message, self.longest, self.vocab_size)
        while await self._step(text.skip_some):
            if not is_open():
                raise DeviceGone
        return text

    async def _step(self, work: Callable[..., Any], *args: Any) -> Any:
        async with self.steps:
            return await asyncio.to_thread(on_own_thread, work, *args)

    async def rows(self, message: Rows) -> Message:
        rows = self.tables.rows
        return RowData(await self._step(rows, message.table, message.first, message.count))

    async def encode(self, message: Encode) -> Message:
        def ids(tokenizer: Any) -> list[int]:
            if not message.chat:
                return tokenizer(message.text)["input_ids"]
            turn = [{"role": "user", "content": message.text}]
            return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]

        return Tokens(packed_ints(await self._tokenized(ids)))

    async def decode(self, message: Decode) -> Message:
        ids, rows = unpacked_ints(message.ids), self.tables.shape[0]
        if not all(0 <= token < rows for token in ids):
            raise ValueError(f"the text holds ids that are no tokens: the target's vocabulary has {rows}")
        text = await self._tokenized(lambda tokenizer: tokenizer.decode(ids, skip_special_tokens=True))
        if len(text.encode()) > MOST_TEXT:
            raise ValueError(f"the text has {len(text.encode())} bytes, more than a message holds: decode it in parts")
        return Text(text)

    async def _tokenized(self, work: Callable[[Any], Any]) -> Any:
        if self.tokenizer is None:
            raise ValueError("this server has no tokenizer: send token ids")
        async with self.turns:
            return await asyncio.to_thread(work, self.tokenizer)


class Conversation:
    """The messages of one connection; `send` raises `DeviceGone` if it cannot send."""

    def __init__(self, desk: Desk, send: Send, is_open: Callable[[], bool]) -> None:
        self._desk, self._send, self._is_open = desk, send, is_open
        self._session: ServedSession | None = None
        self._steps: dict[type[Message], Callable[[Any], Awaitable[Message | None]]] = {
            Open: self._open,
            Draft: self._draft,
            Resume: self._resume,
            Close: self._close,
            Rows: desk.rows,
            Encode: desk.encode,
            Decode: desk.decode,
        }

    async def answer(self, message: Message) -> None:
        """Processes a message and sends the reply, if there is one; raises `DeviceGone`."""
        try:
            reply = await self._steps[type(message)](message)
        except DeviceGone:
            raise
        except Overloaded as overload:
            reply = Refused("overloaded", str(overload), overload.retry_seconds)
        except (WireError, ValueError, TypeError, DraftingRefused) as error:
            reply = Refused("invalid", str(error)[:2048], 0.0)
        except Exception as error:
            log_failure(f"a {type(message).__name__} could not be answered", error)
            reply = _failed(error)
        if reply is not None:
            await self._send(reply)

    def end(self) -> None:
        """Releases the text when the connection has ended."""
        if self._session is not None:
            self._desk.sessions.leave(self._session, self)
            self._session = None

    async def _open(self, message: Open) -> Message | None:
        self._forget()
        desk = self._desk
        text = await desk.opened(message, self._is_open)
        session = self._session = desk.sessions.open(text, self)
        try:
            found = await self._first(text)
            if isinstance(found, Exception):
                self._forget()
                return _failed(found)
            if found.finished:
                session.finish()
            nodes = self._most_nodes(desk.sessions.attached)
            session.used = time.monotonic()
            await self._send(Opened(session.name, found.tokens[0], found.reach, nodes, found.finished))
        except BaseException:
            self._forget()  # the device does not know its name yet
            raise
        return await self._decode_plainly(session) if message.plain else None

    async def _first(self, text: VerifiedText) -> Verified | Exception:
        """Reads a prompt. The next piece is queued once the hidden states of the last one have been sent."""
        while True:
            if not self._is_open():
                raise DeviceGone
            read = await self._queued(text, None)
            if isinstance(read, Exception):
                return read
            for begin in range(0, len(read.taps), PIECE_BYTES):
                await self._send(Taps(read.taps[begin : begin + PIECE_BYTES]))
            if read.first is not None:
                return read.first

    def _queued(self, text: VerifiedText, tree: DraftTree | None) -> asyncio.Future[Any]:
        """Queues a step of a text; returns its outcome, see `Job`."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def done(what: Any) -> None:
            loop.call_soon_threadsafe(lambda: None if outcome.cancelled() else outcome.set_result(what))

        self._desk.batches.submit(Job(text, tree, done))
        return outcome

    async def _decode_plainly(self, session: ServedSession) -> Message | None:
        """Decodes without drafts until the text ends; returns a refusal if that fails."""
        answer = None if session.text.finished else self._submitted_root(session)
        while answer is not None:
            reply = await asyncio.shield(answer)
            if isinstance(reply, Refused):
                return reply
            if not self._is_open():
                raise DeviceGone
            answer = None if reply.finished else self._submitted_root(session)
            await asyncio.sleep(0)  # lets other texts of this forward queue their next job before the reply is sent
            await self._send(reply)
        return None

    def _submitted_root(self, session: ServedSession) -> asyncio.Future[Accepted | Refused]:
        return self._submitted(session, session.number + 1, DraftTree.root(session.text.root))

    async def _draft(self, message: Draft) -> Message:
        session = self._session
        if session is None or self._desk.sessions.find(session.name) is not session:
            return Refused("unknown", "a draft came in for no text: open one first", 0.0)
        if session.holder is not self:
            self._session = None
            return Refused("replaced", "another connection has resumed this text", 0.0)
        session.used = time.monotonic()
        if message.number == session.number and session.answer is not None:
            return session.answer  # it came in twice
        if message.number != session.number + 1:
            return Refused("out of order", f"draft {message.number} came in: expected draft {session.number + 1}", 0.0)
        return await asyncio.shield(self._submitted(session, message.number, self._checked(message, session.text)))

    def _checked(self, message: Draft, text: VerifiedText) -> DraftTree:
        """Unpacks the tree of a draft; raises a WireError if it cannot be verified."""
        tree = unpacked_tree(message, self._desk.tables.shape[0])
        if text.finished:
            raise WireError("the text has ended: nothing can be drafted")
        if tree.tokens[0] != text.root:
            raise WireError("the root of the draft is not the last token of the text")
        most = self._desk.sessions.limits.max_nodes
        if len(tree) - 1 > most or max(tree.depths) > text.reach:
            raise WireError(
                f"the draft has {len(tree) - 1} nodes and depth {max(tree.depths)}: at most {most} and {text.reach} "
                "are possible here"
            )
        return tree

    def _submitted(self, session: ServedSession, number: int, tree: DraftTree) -> asyncio.Future[Accepted | Refused]:
        """Queues a tree. The answer is kept even if the connection ends meanwhile."""
        answer = asyncio.ensure_future(self._kept(session, number, self._queued(session.text, tree)))
        session.verifying = answer
        return answer

    def _most_nodes(self, texts: int) -> int:
        """Nodes that a draft should have where `texts` texts share a forward, and thus its columns."""
        limits = self._desk.sessions.limits
        columns: float = limits.max_columns
        if texts > 1:  # a device alone sees what its nodes cost
            columns = min(columns, self._desk.batches.worthwhile_columns())
        share = int(columns // max(min(texts, limits.max_batch), 1))
        return min(max(share - 1, 1), limits.max_nodes)

    async def _kept(self, session: ServedSession, number: int, outcome: asyncio.Future[Any]) -> Accepted | Refused:
        found: Verified | Exception = await outcome
        session.verifying = None
        if isinstance(found, Exception):  # its state is unknown: the device opens the text again
            self._desk.sessions.remove(session)
            return _failed(found)
        session.number, session.used = number, time.monotonic()
        if found.finished:
            session.finish()
        fields = {**vars(found), "tokens": packed_ints(found.tokens)}
        session.answer = Accepted(number=number, nodes=self._most_nodes(found.batch), **fields)
        return session.answer

    async def _resume(self, message: Resume) -> Message:
        self._forget()
        session = self._desk.sessions.find(message.session)
        if session is None or session.text.plain:
            return Refused("unknown", "there is no such text: open it again with its tokens so far", 0.0)
        self._desk.sessions.attach(session, self)
        self._session = session
        if session.verifying is not None:
            await asyncio.shield(session.verifying)
        return Resumed(session.number)

    async def _close(self, message: Close) -> None:
        self._forget()

    def _forget(self) -> None:
        """Drops the text of this connection, unless another connection has taken it over."""
        if self._session is not None and self._session.holder is self:
            self._desk.sessions.remove(self._session)
        self._session = None


def _failed(error: Exception) -> Refused:
    if isinstance(error, ValueError):
        return Refused("invalid", str(error)[:2048], 0.0)
    return Refused("failed", f"{type(error).__name__} while the target was read; open the text again", 1.0)
