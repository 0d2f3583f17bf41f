"""How much to draft: as much as pays, by what forwards cost on this device and by what was accepted in this text.

Time is counted in plain rounds, see `round_costs`. A draft costs a part of one, so does a verified node, and every
accepted token saves one. Two things are learnt: what forwards and drafts cost, and how the drafts of a text do
(`Habits`). A text begins with what the drafter's last text taught. None of it changes the distribution of what is
emitted. Whoever gives the costs gets the same trees in every run: then nothing is measured, and nothing is kept.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

from ..common.tuning import TUNING
from ..trees.draft_tree import DraftTree
from .calibration import Calibration
from .round_costs import Costs, MeasuredCosts


@dataclass
class Habits:
    """How the drafts of a text have been doing.

    Attributes:
        calibration: how often drafted tokens are right.
        gains: for each depth of a draft, the tokens that it adds, less what verifying its nodes costs; running means.
        drafts: number of drafts that `gains` are means of.
        tokens, time: emitted in a round, and its time in plain rounds; running means.
        accepted, expected: drafted tokens that were accepted of late, and that had been expected to be.
    """

    calibration: Calibration
    gains: list[float]
    drafts: int = 0
    tokens: float = TUNING.first_tokens
    time: float = TUNING.first_time
    accepted: float = 0.0
    expected: float = 0.0

    @classmethod
    def assumed(cls, depth: int) -> Habits:
        return cls(Calibration(), [TUNING.first_gain * TUNING.gain_ratio**d for d in range(depth)])

    def of_depth(self, depth: int) -> Habits:
        """The same for drafts of another greatest depth; gains go on falling beyond what is known."""
        gains = self.gains[:depth]
        last = gains[-1] if gains else 0.0
        further = [last * TUNING.unknown_gain_ratio ** (d + 1) for d in range(depth - len(gains))]
        return replace(self, gains=gains + further)

    def for_another_text(self) -> Habits:
        """What is expected of the next text."""
        return replace(
            self,
            calibration=self.calibration.softened(),
            gains=list(self.gains),
            drafts=min(self.drafts, TUNING.kept_drafts),
            accepted=TUNING.kept_trust * self.accepted,
            expected=TUNING.kept_trust * self.expected,
        )

    @property
    def trust(self) -> float:
        """What an expected token has been worth of late."""
        return min((self.accepted + TUNING.trust_prior) / (self.expected + TUNING.trust_prior), TUNING.most_trust)

    @property
    def rate(self) -> float:
        """Tokens emitted in the time of a plain round; plain decoding has 1, so it is never less."""
        return max(self.tokens / self.time, 1.0)


class Pace(Protocol):
    """How much to draft and to verify, round by round.

    Attributes:
        measures: whether rounds have to be timed.
    """

    @property
    def measures(self) -> bool: ...

    def plan(self, certain: float = 0.0) -> int:
        """How deep to draft in this round. Called once a round, as waiting rounds are counted.

        Args:
            certain: probability that the next token is among those that are proposed without a draft.
        """
        ...

    def scored(self, tree: DraftTree) -> DraftTree:
        """A drafted tree, scored by how probable its nodes are to be accepted."""
        ...

    def weighed(self, trees: Sequence[DraftTree], depth: int) -> list[DraftTree]:
        """The same of trees drafted to some depth just now, of the texts that decide; what each depth adds is noted."""
        ...

    def cut(self, trees: Sequence[DraftTree], deciding: Sequence[DraftTree]) -> list[DraftTree]:
        """The trees with as many nodes as are worth verifying in one forward, by those of the rows that decide.

        Called once a round.
        """
        ...

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Takes what was emitted after the root of an uncut draft, as the drafter scored it."""
        ...

    def timed(
        self, nodes: int, emitted: float, forward_seconds: float | None, depth: int, draft_seconds: float
    ) -> None:
        """Takes how a round went.

        Args:
            nodes: number of nodes verified in the largest tree.
            emitted: number of tokens emitted a row that decides, on average.
            forward_seconds: `None` of a round that did something else too, whose time says nothing.
            depth: that was drafted.
            draft_seconds: time the draft took.
        """
        ...


class FixedPace:
    """Drafts and verifies all there is, in every round."""

    measures = False

    def plan(self, certain: float = 0.0) -> int:
        return sys.maxsize

    def scored(self, tree: DraftTree) -> DraftTree:
        return tree

    def weighed(self, trees: Sequence[DraftTree], depth: int) -> list[DraftTree]:
        return list(trees)

    def cut(self, trees: Sequence[DraftTree], deciding: Sequence[DraftTree]) -> list[DraftTree]:
        return list(trees)

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        pass

    def timed(
        self, nodes: int, emitted: float, forward_seconds: float | None, depth: int, draft_seconds: float
    ) -> None:
        pass


class CostPace:
    """Decides round by round how deep to draft and which nodes to verify. One for a call, all its rows together.

    A batch is done when its last row is, so the rows that are furthest behind decide: `weighed`, `most_nodes` and
    `timed` are told of theirs alone. The other rows draft and verify as much.

    Args:
        depth: the most there may be.
        costs: as given, or as they are measured here.
        habits: what is known of the text, or of texts before it; updated here.
    """

    def __init__(self, depth: int, costs: Costs | MeasuredCosts, habits: Habits | None = None) -> None:
        self.measured = costs if isinstance(costs, MeasuredCosts) else None
        self._given = costs if isinstance(costs, Costs) else None
        self._depth = depth
        self.habits = Habits.assumed(depth) if habits is None else habits
        self._pause = self._waited = 0
        self._steps_plainly = False  # in this round, to see how long that takes
        self._promised = 0.0  # tokens that this round's tree was expected to gain

    def take_over(self, before: CostPace) -> None:
        """Goes on with what another pace of the call has learnt of the text."""
        self.habits = before.habits.of_depth(self._depth)
        self._pause, self._waited = before._pause, before._waited

    @property
    def measures(self) -> bool:
        """Whether rounds have to be timed."""
        return self.measured is not None

    @property
    def costs(self) -> Costs:
        if self.measured is not None:
            return self.measured.costs
        assert self._given is not None
        return self._given

    @property
    def rate(self) -> float:
        return self.habits.rate

    def plan(self, certain: float = 0.0) -> int:
        self._steps_plainly = self.measured is not None and self.measured.wants_plain(self.rate)
        if self._steps_plainly:
            return 0
        chosen = self._best_depth(certain)
        if chosen or certain > TUNING.certain:
            return chosen
        self._waited += 1
        if self._waited <= self._pause:
            return 0
        self.habits.accepted, self.habits.expected = self.habits.accepted / 2, self.habits.expected / 2
        self._waited, self._pause = 0, min(max(2 * self._pause, TUNING.first_pause), TUNING.longest_pause)
        return min(1, self._depth)

    def _best_depth(self, certain: float) -> int:
        """The depth that gains most; 0 where none gains."""
        costs, gain, best, chosen = self.costs, 0.0, 0.0, 0
        for depth, more in enumerate(self.habits.gains, 1):
            gain += (1.0 - certain) * more * self.habits.trust
            worth = gain - self.rate * costs.drafting(depth)
            if worth > best:
                best, chosen = worth, depth
        return chosen

    def scored(self, tree: DraftTree) -> DraftTree:
        return self.habits.calibration.applied(tree)

    def weighed(self, trees: Sequence[DraftTree], depth: int) -> list[DraftTree]:
        trees, costs, habits, count = [self.scored(tree) for tree in trees], self.costs, self.habits, len(trees)
        gains = self._gains(trees, depth)
        habits.drafts += count
        weight = max(1.0 - TUNING.pace_fading**count, count / (habits.drafts + 1))  # of the first few their mean
        known = habits.gains
        for level in range(len(known)):
            if level < depth:
                known[level] += weight * (gains[level] - known[level])
            elif level > 0:  # not drafted: as the last one that was, on in the same ratio
                before = known[level - 2] if level > 1 else 0.0
                ratio = known[level - 1] / before if before else TUNING.unknown_gain_ratio
                known[level] = known[level - 1] * min(ratio, TUNING.most_gain_ratio)
        if sum(gains) > self.rate * costs.drafting(depth):
            self._pause = 0
        return trees

    def _gains(self, trees: Sequence[DraftTree], depth: int) -> list[float]:
        """What each depth of scored trees adds for a text on average, where all are cut to one width.

        See `most_nodes`.
        """
        costs, rate = self.costs, self.rate
        least = rate * costs.node
        ranked = [sorted(range(1, len(tree)), key=[-score for score in tree.scores].__getitem__) for tree in trees]
        paths = [[math.exp(tree.scores[node]) for node in nodes] for tree, nodes in zip(trees, ranked, strict=True)]
        width = sum(sum(column) > least * len(trees) for column in zip_longest(*paths, fillvalue=0.0))
        gains = [0.0] * depth
        for tree, nodes, path in zip(trees, ranked, paths, strict=True):
            for node, probability in zip(nodes[:width], path[:width], strict=True):
                gains[tree.depths[node] - 1] += (probability - least) / len(trees)
        gains = [max(gain, 0.0) for gain in gains]
        total = sum(gains)
        if len(trees) == 1 or not total:  # of a single text `most_nodes` alone counts what a tree costs
            return gains
        share = max(1.0 - rate * costs.tree / total, 0.0)  # where no tree is verified, none gains
        return [share * gain for gain in gains]

    def most_nodes(self, trees: Sequence[DraftTree]) -> int:
        """How many nodes of each tree are worth verifying in one forward, best first. Called once a round.

        A forward over a batch is as wide as its largest tree, so a further node is one of every tree.
        """
        self._promised = 0.0
        if self._steps_plainly:
            return 0
        costs, trust = self.costs, self.habits.trust
        ranked = [sorted(map(math.exp, tree.scores[1:]), reverse=True) for tree in trees]
        gains = [sum(column) / len(trees) for column in zip_longest(*ranked, fillvalue=0.0)]
        least = self.rate * costs.node / trust
        size = sum(gain >= least for gain in gains)
        if self.measured is not None:
            size = min(size, self.measured.most_nodes)
        expected = sum(gains[:size])
        if expected * trust <= self.rate * costs.verifying(size):
            return 0
        self._promised = expected
        return size

    def cut(self, trees: Sequence[DraftTree], deciding: Sequence[DraftTree]) -> list[DraftTree]:
        size = self.most_nodes(deciding)
        return [tree.first(size) for tree in trees]

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        self.habits.calibration.learn(tree, tokens)

    def timed(
        self, nodes: int, emitted: float, forward_seconds: float | None, depth: int, draft_seconds: float
    ) -> None:
        costs, habits = self.costs, self.habits
        if self.measured is not None and forward_seconds is not None:
            self.measured.add(nodes, forward_seconds, depth, draft_seconds)
        if nodes:
            habits.accepted = TUNING.pace_fading * habits.accepted + emitted - 1.0
            habits.expected = TUNING.pace_fading * habits.expected + self._promised
        self._promised = 0.0
        if self._steps_plainly:  # says nothing of what drafting yields
            return
        habits.tokens += (1.0 - TUNING.pace_fading) * (emitted - habits.tokens)
        habits.time += (1.0 - TUNING.pace_fading) * (costs.round(nodes, depth) - habits.time)


# Of each target, and of each drafter: kinds of calls, and what was learnt in them.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], MeasuredCosts]] = weakref.WeakKeyDictionary()
_habits: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Habits]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class KindOfCall:
    """What costs and habits depend on.

    Attributes:
        costs: all that the costs depend on beside the target and the sizes below; hashable.
        habits: all that the habits depend on beside the drafter; hashable.
        depth, tree_size: the most that is drafted and verified of a row.
        rows: number of rows in a forward.
        packed: whether the target's weights are.
    """

    costs: tuple[Any, ...]
    habits: tuple[Any, ...]
    depth: int
    tree_size: int
    rows: int = 1
    packed: bool = False

    def key(self, packed: bool | None = None) -> tuple[Any, ...]:
        return (*self.costs, self.depth, self.tree_size, self.rows, self.packed if packed is None else packed)


def pace_for(
    target: Any, drafter: Any, kind: KindOfCall, given: Costs | None, before: CostPace | None = None, share: float = 1.0
) -> CostPace:
    """The pace of a call, with what is known of calls of its kind.

    Args:
        given: goes before what was measured.
        before: of the same call until now.
        share: what part of the rows that were read until now is read from here on.
    """
    if given is not None:
        pace = CostPace(kind.depth, given)
    else:
        known = _known.setdefault(target, {})
        measured = known.get(kind.key())
        if measured is None:
            like = before.measured if before is not None and share < 1.0 else None
            measured = like.of_fewer(share) if like is not None else MeasuredCosts.of_rows(kind.rows)
            known[kind.key()] = measured
        pace = CostPace(kind.depth, measured)
    if before is not None:
        pace.take_over(before)
    if given is None:
        of_drafter = _habits.setdefault(drafter, {})
        former = of_drafter.get(kind.habits)
        if before is None and former is not None:
            pace.habits = former.for_another_text().of_depth(kind.depth)
        of_drafter[kind.habits] = pace.habits
    return pace


def slower_packed(target: Any, kind: KindOfCall) -> bool:
    """Whether plain rounds take longer with packed weights: the layout may not suit a processor."""
    known = _known.get(target, {})
    packed, apart = known.get(kind.key(packed=True)), known.get(kind.key(packed=False))
    if packed is None or apart is None or not packed.plain or not apart.plain:
        return False
    return packed.plain > TUNING.packed_slower * apart.plain
