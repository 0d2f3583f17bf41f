"""Those who watch the rounds of a call without deciding anything of its text: clocks, statistics, packing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..acceleration.cpu.packing import Packing
from ..drafters.protocol import Accepted, Ask
from ..target.target_runtime import TargetRuntime
from ..trees.draft_tree import DraftTree
from .call_output import Clock, DraftStatistics
from .drafting import Drafting


@dataclass(frozen=True)
class Round:
    """What a round did.

    Attributes:
        nodes: number of nodes that each text's tree had beside the root.
        accepted: number of emitted tokens of each text that its tree held.
        forwards: number of forwards of the target.
        emitted: number of tokens emitted by each text that the batch waits for.
        depth: depth that the drafter's session was asked for; 0 where it was not asked. Its trees may be shallower.
        trees: tree that was verified for each text.
        tokens: what each text got: `accepted` tokens along a path of its tree, then the target's own.
    """

    nodes: Sequence[int]
    accepted: Sequence[int]
    forwards: int
    emitted: Sequence[int]
    depth: int
    trees: Sequence[DraftTree]
    tokens: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, asks: Sequence[Ask], trees: Sequence[DraftTree], news: Sequence[Accepted], forwards: int, depth: int
    ) -> Round:
        """The round that answered `asks` with `trees`, of which `news` came."""
        emitted = [len(each.tokens) for ask, each in zip(asks, news, strict=True) if ask.decides]
        nodes, accepted = [len(tree) - 1 for tree in trees], [each.num_drafted for each in news]
        return cls(nodes, accepted, forwards, emitted, depth, trees, [each.tokens for each in news])


class Observer:
    """Told of each round as it goes. A streamer of `generate()` may be one too, for its own call."""

    def began(self) -> None:
        """A round begins."""

    def drafted(self) -> None:
        """Its drafts are made."""

    def verified(self) -> None:
        """Its forward is done, and what is accepted is decided."""

    def ended(self, done: Round) -> None:
        """All is emitted, kept and told to the sessions."""


class StatisticsKeeper(Observer):
    """Enters rounds into the statistics of a call, if it keeps any."""

    def __init__(self, statistics: DraftStatistics | None, clock: Clock) -> None:
        self._statistics, self._clock = statistics, clock

    def began(self) -> None:
        self._clock.start()

    def drafted(self) -> None:
        self._clock.stop("draft_seconds")

    def verified(self) -> None:
        self._clock.stop("verify_seconds")

    def ended(self, done: Round) -> None:
        self._clock.stop("commit_seconds")
        if self._statistics is not None:
            self._statistics.target_forwards += done.forwards if done.nodes else 0  # idle ones keep processes in step
            self._statistics.row_forwards += len(done.nodes) * done.forwards
            self._statistics.accepted_lengths += done.accepted
            self._statistics.drafted_nodes += done.nodes


class PaceTimer(Observer):
    """Tells the pace how long rounds take, and what came of them."""

    def __init__(self, drafting: Drafting, packer: Packer) -> None:
        self._drafting, self._packer = drafting, packer
        self._began = self._drafted = self._verified = 0.0

    def _now(self) -> float:
        return time.perf_counter() if self._drafting.pace.measures else 0.0

    def began(self) -> None:
        self._began = self._now()

    def drafted(self) -> None:
        self._drafted = self._now()

    def verified(self) -> None:
        self._verified = self._now()  # reading the choices has waited for the device

    def ended(self, done: Round) -> None:
        if done.emitted:
            emitted = sum(done.emitted) / len(done.emitted)
            seconds = None if self._packer.packs else self._verified - self._drafted
            draft_seconds = self._drafted - self._began
            self._drafting.pace.note_round(max(done.nodes), emitted, seconds, done.depth, draft_seconds)


class Packer(Observer):
    """Lets forwards multiply by packed weights once that pays.

    Args:
        packing: of the target's weights.
        changed: called when forwards become others, whose costs have to be learnt anew.

    Attributes:
        packs: whether the next forward packs, and takes longer for it.
    """

    def __init__(self, packing: Packing, runtime: TargetRuntime, changed: Callable[[], None]) -> None:
        self._packing, self._runtime, self._changed = packing, runtime, changed
        self.packs = False

    def begin(self, room: int) -> None:
        """Before the first round.

        Args:
            room: number of tokens that the call may emit.
        """
        self.packs = self._packing.begin(room)
        self._runtime.multiply_by(self._packing.weights)

    def ended(self, done: Round) -> None:
        if not done.emitted:
            return
        self.packs = self._packing.after_round()
        if self._packing.weights is not None and not self._runtime.packed:
            self._runtime.multiply_by(self._packing.weights)
            self._changed()
