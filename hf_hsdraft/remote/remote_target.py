"""A remote target and its rounds: drafts are sent, and accepted tokens come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..core.tuning import MOST_KNOWN
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Accepted as News
from ..drafters.base.protocol import Call, Drafter
from ..engine.drafting import Drafting, Wanted
from ..engine.loop import Keeper, Observer, Round, decode
from ..pace.pacing import KindOfCall
from .link import Link, LinkLost, LinkPool, Patience, ServerRefused
from .messages import (
    Accepted,
    Close,
    Open,
    Opened,
    Resume,
    Resumed,
    Taps,
    packed_ints,
    packed_tree,
    unpacked_ints,
    unpacked_states,
)
from .wire import Message, WireError

_GONE = ("unknown", "failed", "overloaded")  # refusals after which a text may be opened again


@dataclass
class LinkStatistics:
    """Traffic and reconnects of a text.

    Attributes:
        sent, received: bytes of all messages.
        prompt_received: bytes received until the first token.
        batches: number of texts in the forward of each round.
        server_seconds: of these forwards.
        resumed: number of reconnects.
        reopened: number of times that the text was opened again with its tokens.
        waited_seconds: for an overloaded server.
    """

    sent: int = 0
    received: int = 0
    prompt_received: int = 0
    batches: list[int] = field(default_factory=list)
    server_seconds: float = 0.0
    resumed: int = 0
    reopened: int = 0
    waited_seconds: float = 0.0


class RemoteTarget:
    """A text that a remote target decodes; see `engine.loop.Target`.

    `opening` has the prompt, and how the server decodes it. `draft` is `None` without a drafter, where the server
    decodes by itself. `width` is the size of a hidden state.
    """

    def __init__(self, links: LinkPool, opening: Open, draft: DraftOptions | None, width: int) -> None:
        self._links, self._opening, self._draft = links, opening, draft
        self._width = width * len(opening.taps)
        self.tokens, self.finished, self.forwards = unpacked_ints(opening.ids), False, 0
        self.statistics = LinkStatistics()
        self._reach = self._most_nodes = self._number = 0
        self._session = ""
        self._link: Link | None = None
        self._counted = (0, 0)  # the connection's bytes already in the statistics
        self._waits = False  # for an answer

    def open(self) -> News:
        earlier = self.tokens[-MOST_KNOWN:]
        news = self._persistently(lambda: self._opened(self._opening.taps_from))
        self.statistics.prompt_received = self.statistics.received
        return replace(news, earlier=earlier)

    def goes_on(self) -> bool:
        return not self.finished

    def prepare(self, drafting: Drafting) -> None:
        """Does nothing: limits come with each answer of the server."""

    def asks(self) -> list[Wanted]:
        """The draft wanted for the next round, with no more nodes than the server allows."""
        if self.finished or self._draft is None:
            return []
        size = min(self._draft.tree_size, self._most_nodes)
        reach = min(self._reach, size)  # no tree is deeper than it has nodes
        depth = min(reach, self._draft.depth)
        return [Wanted(0, self.tokens[-1], depth, size, self._draft.beam_width, reach=reach)]

    def undone_on_error(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the server keeps the cache

    def verify(self, trees: Sequence[DraftTree]) -> News:
        """Sends a draft; returns what the server has accepted.

        If the server has lost the text, it is opened again with its tokens; the draft then counts as rejected.
        """
        number = self._number + 1
        message = packed_tree(number, trees[0])

        def exchange() -> News:
            link = self._linked()
            if not self._session:
                return self._opened(len(self.tokens) - 1)
            link.send(message)
            answer = link.receive(Accepted)
            while answer.number < number:  # a late answer to a draft that was sent twice
                answer = link.receive(Accepted)
            return self._news(answer)

        return self._persistently(exchange)

    def accept(self, read: News) -> None:
        """Does nothing: the server accepts."""

    def commit(self, read: News, verdicts: None) -> None:
        """Does nothing: the server keeps the cache."""

    def news(self, read: News, verdicts: None) -> list[News]:
        return [read]

    def receive(self) -> News:
        """Returns the next round of a server that decodes by itself."""

        def next_round() -> News:
            link = self._linked()
            return self._news(link.receive(Accepted)) if self._session else self._opened(len(self.tokens) - 1)

        return self._persistently(next_round)

    def _opened(self, taps_from: int) -> News:
        """Opens the text with its tokens so far; returns the news from position `taps_from` on."""
        link = self._linked()
        link.send(replace(self._opening, ids=packed_ints(self.tokens), taps_from=taps_from))
        states = bytearray()
        reply: Message = link.receive(Taps, Opened)
        while isinstance(reply, Taps):
            states += reply.states
            reply = link.receive(Taps, Opened)
        assert isinstance(reply, Opened)
        self._session, self._number = reply.session, 0
        self._reach, self._most_nodes, self.finished = reply.reach, reply.nodes, reply.finished
        self.tokens.append(reply.token)
        self.statistics.reopened += self.forwards > 0
        self.forwards += 1
        return self._told(states, taps_from, [reply.token], 0)

    def _news(self, answer: Accepted) -> News:
        begin, tokens = len(self.tokens) - 1, unpacked_ints(answer.tokens)
        self._number, self.finished = answer.number, answer.finished
        self._reach, self._most_nodes = answer.reach, answer.nodes
        self.tokens += tokens
        self.forwards += 1
        self.statistics.batches.append(answer.batch)
        self.statistics.server_seconds += answer.seconds
        return self._told(answer.taps, begin, tokens, answer.drafted)

    def _told(self, states: bytes | bytearray, begin: int, tokens: list[int], drafted: int) -> News:
        """News for the drafter of the positions from `begin` on, which the target has read."""
        following = torch.tensor(self.tokens[begin + 1 :])
        taps = unpacked_states(states, self._width) if self._width else torch.zeros(len(following), 0)
        if len(taps) != len(following):
            raise WireError(f"hidden states of {len(taps)} positions came in: expected {len(following)}")
        places = torch.arange(begin, begin + len(following))
        return News(0, tokens, taps, places, following, (), drafted)

    def _linked(self) -> Link:
        """The connection; a new one resumes the text if the server still has it."""
        if self._link is None:
            self._link = self._links.take()
            self._counted = self._link.sent, self._link.received
            if self._draft is None:
                self._session = ""
            if self._session:
                try:
                    self._link.ask(Resume(self._session), Resumed)
                    self.statistics.resumed += 1
                except ServerRefused as refusal:
                    if refusal.reason not in _GONE:
                        raise
                    self._session = ""
        return self._link

    def _persistently(self, step: Callable[[], News]) -> News:
        """Runs a step; retries it if the connection ends, or the server is overloaded or has lost the text."""
        patience = Patience(self._links.patience)
        while True:
            try:
                self._waits = True
                news = step()
                self._waits = False
                self._count()
                return news
            except LinkLost as error:
                self._drop()
                patience.wait(error)
            except ServerRefused as refusal:
                if self._link is not None:  # else no connection was made, and the text may still be there
                    self._session = ""
                if refusal.reason not in _GONE:
                    self._drop()
                    raise
                if refusal.reason == "overloaded":
                    self._drop()
                    self.statistics.waited_seconds += patience.wait(refusal, refusal.retry_seconds)
                elif refusal.reason == "failed":
                    patience.wait(refusal, refusal.retry_seconds)

    def _count(self) -> None:
        if self._link is not None:
            sent, received = self._counted
            self.statistics.sent += self._link.sent - sent
            self.statistics.received += self._link.received - received
            self._counted = self._link.sent, self._link.received

    def _drop(self) -> None:
        if self._link is not None:
            self._count()
            self._link.close()
            self._link = None

    def end(self) -> Link | None:
        """Closes the text; returns the connection if another text can use it."""
        link, self._link = self._link, None
        if link is None:
            return None
        try:
            if self._waits or (self._draft is None and not self.finished):  # the server is still sending
                raise LinkLost
            link.send(Close())
            return link
        except LinkLost:
            link.close()
            return None


@dataclass
class Streaming(Observer):
    """Hands the tokens of each round to a streamer."""

    streamer: Any

    def ended(self, done: Round) -> None:
        for news in done.news:
            self.streamer.put(torch.tensor(news.tokens))


def decode_rounds(
    target: RemoteTarget,
    drafter: Drafter | None,
    call: Call | None,
    keeper: Keeper,
    observers: Sequence[Observer],
) -> None:
    """Runs the prompt and all rounds of a text; without a drafter the server decodes by itself.

    Raises `LinkLost` if the connection was lost for longer than the patience, or `ServerRefused`.
    """

    def undrafted(news: News) -> None:
        keeper.statistics.target_forwards += 1
        keeper.statistics.row_forwards += 1
        for each in observers:
            each.ended(Round([], [], [news], 1, 0))

    keeper.began()
    first = target.open()
    keeper.enter("prefill")
    undrafted(first)
    if drafter is None or call is None:
        while not target.finished:
            undrafted(target.receive())
        return
    drafting = Drafting(drafter, call)
    drafting.observe([first])
    session, options = drafting.session, call.options
    # The round trip is part of every round's cost, so drafts grow deeper.
    by = (type(session).__qualname__, *session.kind, options.beam_width, repr(sorted(options.own.items())))
    depth = 0 if session.free else options.depth
    drafting.set_pace(options, KindOfCall(by, by, depth, options.tree_size))
    keeper.report_to(drafting)
    decode(target, drafting, [keeper, *observers])
    session.end()
