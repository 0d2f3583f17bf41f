"""The rounds of a call: draft, verify, accept, commit, observe ("Make Every Draft Count").

Accepted so far are the tokens x_0 to x_t of a text. The target has read all of them but x_t, the root of the next tree.
One round makes a + 1 tokens in one forward:

- draft: the drafter proposes a tree. A node of depth d is a candidate for x_{t+d}. The pace sets depth and size.
- verify: the target reads the root at position t and the nodes at t + depth, all at once.
- accept: from the root on, the target chooses its own next token at each node, for as long as that token was drafted.
- commit: the path of a nodes and the token after it are emitted. The cache keeps root and path, and drops the rest.
- observe: the drafter takes the new tokens and the hidden states of root and path.

A batch takes the same steps with a tree for each text. `decode` does not know where the target is: it runs in this
process (`local_target`) or at a server (`remote`). Clocks, statistics and the pace listen as observers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..core.draft_tree import DraftTree, Expansion
from ..core.processors import ProcessorTime
from ..core.statistics import DraftStatistics
from ..drafters.base.protocol import Accepted
from .drafting import Drafting, Wanted


class Target(Protocol):
    """Verifies drafts and holds the texts after the prompts. `read` and `verdicts` have its own types."""

    @property
    def forwards(self) -> int: ...

    def goes_on(self) -> bool:
        """Whether a text still grows."""

    def prepare(self, drafting: Drafting) -> None:
        """Before a round: removes texts that have ended, and renews limits that no longer hold."""

    def asks(self) -> list[Wanted]:
        """The wanted drafts, for the texts that still grow."""

    def undone_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Undoes what a forward has read if it, or what follows it inside, is interrupted."""

    def verify(self, trees: Sequence[DraftTree]) -> Any:
        """Reads the trees of `asks`, in this order, in one forward."""

    def accept(self, read: Any) -> Any:
        """Decides which path of each tree is accepted, and which token follows it."""

    def commit(self, read: Any, verdicts: Any) -> None:
        """Emits what is accepted, and keeps it in the cache."""

    def news(self, read: Any, verdicts: Any) -> list[Accepted]:
        """What each text got, in the order of `asks`."""


def decode(target: Target, drafting: Drafting, observers: Sequence[Observer]) -> None:
    """Runs rounds until all texts have ended. Observers are called in order."""
    while target.goes_on():
        decode_round(target, drafting, observers)


def decode_round(target: Target, drafting: Drafting, observers: Sequence[Observer]) -> None:
    """Runs one round."""
    target.prepare(drafting)
    for each in observers:
        each.began()
    asks, forwards = target.asks(), target.forwards
    trees = drafting.draft(asks)
    for each in observers:
        each.drafted()
    with target.undone_on_error():
        read = target.verify(trees)
        verdicts = target.accept(read)
        for each in observers:
            each.verified()
        target.commit(read, verdicts)
    news, followed = target.news(read, verdicts), drafting.session.followed
    drafting.observe(news)
    done = Round(asks, trees, news, target.forwards - forwards, drafting.depth, followed)
    for each in observers:
        each.ended(done)


@dataclass(frozen=True)
class Round:
    """What a round did for the texts that still grew."""

    asks: Sequence[Wanted]
    trees: Sequence[DraftTree]
    news: Sequence[Accepted]
    forwards: int  # of the target
    depth: int  # asked of the drafter's session; 0 if it was not asked. Its trees may be shallower.
    followed: float = 0.0  # seconds of verification in which the device made the next draft, see `Session.follow`

    @property
    def nodes(self) -> list[int]:
        """Number of nodes besides the root, for each text."""
        return [len(tree) - 1 for tree in self.trees]

    @property
    def accepted(self) -> list[int]:
        """Number of accepted draft tokens, for each text."""
        return [each.num_drafted for each in self.news]

    @property
    def emitted(self) -> list[int]:
        """Number of emitted tokens, for each text that the batch waits for."""
        return [len(each.tokens) for ask, each in zip(self.asks, self.news, strict=True) if ask.decides]

    @property
    def progress(self) -> int:
        """Number of tokens by which the shortest text, with which the batch ends, has grown."""
        return min((ask.ahead + len(each.tokens) for ask, each in zip(self.asks, self.news, strict=True)), default=0)


class Observer:
    """Called at each step of a round. A streamer of `generate()` may be one too, for its own call.

    Attributes:
        on_expansion: takes the rows and the [`Expansion`] that their trees grow from, in a form usable after the call.
            `None` if unused, as making that form may copy what was read.
    """

    on_expansion: Callable[[Sequence[int], Expansion], None] | None = None

    def began(self) -> None:
        """The asks of the round are about to be made."""

    def drafted(self) -> None:
        """The trees are made."""

    def verified(self) -> None:
        """The forward is done and acceptance is decided."""

    def ended(self, done: Round) -> None:
        """All is emitted and kept, and the sessions have observed it."""


class Keeper(Observer):
    """Records a call in its statistics, and reports its rounds to the pace. With `timed` it waits for the device."""

    def __init__(self, statistics: DraftStatistics, device: torch.device, timed: bool) -> None:
        self.statistics, self._timed, self._waits = statistics, timed, timed and device.type == "cuda"
        self._device, self._seconds = device, dict[str, float]()  # of each part of a round
        self._drafting: Drafting | None = None
        self._processors = ProcessorTime(device)
        self._begin = self._last = self._now()

    def report_to(self, drafting: Drafting, acceleration: Any = None, repace: Callable[[], Any] = lambda: None) -> None:
        """Reports rounds to the pace from now on. `repace` is called when the `Acceleration` changes forwards."""
        self._drafting, self._acceleration, self._repace = drafting, acceleration, repace

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        pace = None if self._drafting is None else self._drafting.pace
        measures = pace is not None and pace.measured is not None
        return time.perf_counter() if self._timed or measures else 0.0

    def enter(self, part: str) -> None:
        """Ends a part of a round or of the call: `"draft"`, ..."""
        now = self._now()
        self._seconds[part], self._last = now - self._last, now
        if now:
            name = f"{part}_seconds"
            setattr(self.statistics, name, getattr(self.statistics, name) + self._seconds[part])

    def finish(self) -> None:
        self.statistics.processor_share = self._processors.share()
        if self._drafting is not None and self._drafting.pace is not None:
            self.statistics.plain_seconds = self._drafting.pace.plain_seconds
        if self._timed:
            self.statistics.total_seconds = self._now() - self._begin

    def began(self) -> None:
        self._last = self._now()

    def drafted(self) -> None:
        self.enter("draft")

    def verified(self) -> None:
        self.enter("verify")  # reading the choices has waited for the device

    def ended(self, done: Round) -> None:
        self.enter("commit")
        if self._last:  # timed
            self.statistics.draft_seconds += done.followed
            self.statistics.verify_seconds -= done.followed
        self.statistics.target_forwards += done.forwards if done.nodes else 0  # idle rounds keep processes in step
        self.statistics.row_forwards += len(done.nodes) * done.forwards
        self.statistics.accepted_lengths += done.accepted
        self.statistics.drafted_nodes += done.nodes
        self.statistics.round_rows += [each.row for each in done.news]
        self.statistics.relaxed_tokens += sum(each.num_relaxed for each in done.news)
        if self._drafting is not None and done.emitted:
            self._report(self._drafting, done)

    def _report(self, drafting: Drafting, done: Round) -> None:
        acceleration, seconds, followed = self._acceleration, self._seconds, done.followed
        forward = None if acceleration is not None and acceleration.packs else seconds["verify"] - followed
        if drafting.pace is not None:
            emitted, mean = {each.row: each.tokens for each in done.news}, sum(done.emitted) / len(done.emitted)
            draft = seconds["draft"] + followed
            drafting.pace.learn(emitted, max(done.nodes), mean, done.progress, done.depth, draft, forward)
        if acceleration is not None and acceleration.after_round(max(done.emitted)):
            self._repace()
