"""The pace: how deep to draft and how many nodes to verify, so that decoding takes the least time.

All times are in plain rounds, see `costs_and_habits`. An accepted token saves one plain round; a draft and each
verified node cost a part of one. Two things are learnt: what forwards and drafts cost (`MeasuredCosts`), and how often
the drafts of a text are right (`Habits`). A text begins with the habits of the drafter's last text. The pace never
changes the distribution of the emitted text. Where the user gives the costs, nothing is measured or remembered, and
each run drafts the same trees.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING
from .costs_and_habits import Costs, Habits, MeasuredCosts


class Pace:
    """How much to draft and to verify in each round. This class drafts and verifies all there is."""

    measures = False

    @property
    def plain_seconds(self) -> float | None:
        """Time of a plain round; `None` where it is not measured."""
        return None

    def plan(self, certain: float = 0.0) -> int:
        """Begins a round and returns how deep to draft. Rounds without a draft are counted here.

        `certain` is the probability that the next token is among those proposed without a draft.
        """
        return sys.maxsize

    def scored(self, trees: Mapping[int, DraftTree], depth: int, deciding: Sequence[int]) -> Mapping[int, DraftTree]:
        """Returns new drafts by text, scored by how probable it is that their nodes are accepted.

        Notes what each depth adds, up to the drafted one, by the texts that are `deciding`.
        """
        return trees

    def cut(self, trees: Sequence[DraftTree], deciding: Sequence[DraftTree]) -> list[DraftTree]:
        """Cuts all `trees` to the number of nodes worth verifying, by the `deciding` ones. Called once a round."""
        return list(trees)

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Learns from a whole draft, with the drafter's scores, and the tokens emitted after its root."""

    def note_round(
        self,
        nodes: int,  # number of nodes verified in the largest tree
        emitted: float,  # mean number of tokens emitted by the deciding texts
        forward_seconds: float | None,  # time of the target's forward; `None` if it did something else too
        depth: int,  # depth that was drafted; 0 for no draft
        draft_seconds: float,  # time of the draft
        progress: float | None = None,  # number of tokens by which the shortest text has grown; `None` for `emitted`
    ) -> None:
        """Notes how a round went."""


class CostPace(Pace):
    """Chooses the depth and the nodes that save most time. One pace serves all texts of a call.

    A batch ends with its last text. So the texts furthest behind decide, and the others draft and verify as much.

    Expectations may be wrong. So the pace keeps an account of the time that drafting has saved and cost, over all texts
    of the drafter (`Habits.saved`). In debt, a draft has to promise more than its cost, in proportion to the debt.
    Each round pays a small part of the debt off. A trial after a pause has to be paid for beforehand, and a text begins
    with the pause that the last one came to. A batch of `rows` texts, which a draft costs more and gains less, saves up
    less to lose.
    """

    def __init__(self, depth: int, costs: Costs | MeasuredCosts, rows: int = 1) -> None:
        self.habits, self._batch = Habits.assumed(depth), rows > 1
        self.measured = costs if isinstance(costs, MeasuredCosts) else None
        self.measures = self.measured is not None
        self._depth, self._costs = depth, costs
        self._pause = 0  # rounds to wait before the next draft
        self._waited = 0
        self._is_plain = False  # this round drafts nothing, to time it
        self._promised = 0.0  # expected gain of this round's trees, in tokens

    def take_over(self, before: CostPace) -> None:
        """Continues with what an earlier pace of the call has learnt of the text."""
        self.habits = before.habits.of_depth(self._depth)
        self._pause, self._waited = before._pause, before._waited

    def begin_with(self, habits: Habits) -> None:
        """Begins a text with the habits of the drafter's last one."""
        self.habits = habits.for_another_text().of_depth(self._depth)
        self._pause = self.habits.pause

    @property
    def plain_seconds(self) -> float | None:
        return None if self.measured is None else self.measured.plain

    @property
    def costs(self) -> Costs:
        return self._costs if isinstance(self._costs, Costs) else self._costs.costs

    def plan(self, certain: float = 0.0) -> int:
        habits = self.habits
        self._is_plain = self.measured is not None and self.measured.wants_plain(habits.rate)
        if self._is_plain:
            return 0
        chosen = self._best_depth(certain)
        if chosen or certain > TUNING.certain:
            return chosen
        if habits.saved < self.costs.drafting(1):  # no trials in debt
            return 0
        self._waited += 1
        if self._waited <= self._pause:
            return 0
        # The text may have changed, so what was accepted and expected before counts half.
        habits.accepted, habits.expected = habits.accepted / 2, habits.expected / 2
        self._waited, self._pause = 0, min(max(2 * self._pause, TUNING.first_pause), TUNING.longest_pause)
        habits.pause = self._pause
        return min(1, self._depth)

    @property
    def _least_worth(self) -> float:
        """How many times its cost a draft has to promise."""
        return 1.0 + TUNING.worth_of_debt * max(-self.habits.saved, 0.0)

    def _best_depth(self, certain: float) -> int:
        """Returns the depth that gains most; 0 where none gains."""
        costs, rate, trust = self.costs, self.habits.rate, self.habits.trust
        gain, best, chosen = 0.0, 0.0, 0
        for depth, added in enumerate(self.habits.gains, 1):
            gain += (1.0 - certain) * added * trust
            worth = gain - self._least_worth * rate * costs.drafting(depth)
            if worth > best:
                best, chosen = worth, depth
        return chosen

    def scored(self, trees: Mapping[int, DraftTree], depth: int, deciding: Sequence[int]) -> Mapping[int, DraftTree]:
        scored = {row: self.habits.calibration.applied(tree) for row, tree in trees.items()}
        self._note_gains([scored[row] for row in deciding], depth)
        return scored

    def _note_gains(self, trees: Sequence[DraftTree], depth: int) -> None:
        habits, count, gains = self.habits, len(trees), self._gains(trees, depth)
        habits.drafts += count
        weight = max(1.0 - TUNING.pace_fading**count, count / (habits.drafts + 1))  # the first few drafts count alike
        known = habits.gains
        for level in range(len(known)):
            if level < depth:
                known[level] += weight * (gains[level] - known[level])
            elif level > 0:  # not drafted: extrapolated from the two depths before
                before = known[level - 2] if level > 1 else 0.0
                ratio = known[level - 1] / before if before else TUNING.unknown_gain_ratio
                known[level] = known[level - 1] * min(ratio, TUNING.most_gain_ratio)
        if sum(gains) > habits.rate * self.costs.drafting(depth):
            self._pause = habits.pause = 0

    def _gains(self, trees: Sequence[DraftTree], depth: int) -> list[float]:
        """Returns for each depth how many tokens its nodes add, less what verifying them costs.

        A node adds the probability that it is accepted. As in `cut`, all trees keep equally many nodes, the best ones,
        while a further node of each tree pays. The gains are means over the trees.
        """
        costs, rate = self.costs, self.habits.rate
        least = rate * costs.node
        nodes = [list(zip(tree.scores[1:], tree.depths[1:], strict=True)) for tree in trees]
        ranked = [sorted(of_tree, key=lambda node: -node[0]) for of_tree in nodes]
        columns = zip_longest(*([math.exp(score) for score, _ in of_tree] for of_tree in ranked), fillvalue=0.0)
        width = sum(sum(column) > least * len(trees) for column in columns)
        gains = [0.0] * depth
        for score, level in (node for of_tree in ranked for node in of_tree[:width]):
            gains[level - 1] += (math.exp(score) - least) / len(trees)
        gains = [max(gain, 0.0) for gain in gains]
        total = sum(gains)
        if len(trees) == 1 or not total:  # with one text only `cut` counts the tree's cost
            return gains
        share = max(1.0 - rate * costs.tree / total, 0.0)  # a tree that is not verified gains nothing
        return [share * gain for gain in gains]

    def cut(self, trees: Sequence[DraftTree], deciding: Sequence[DraftTree]) -> list[DraftTree]:
        size = self._best_size(deciding)
        return [tree.first(size) for tree in trees]

    def _best_size(self, trees: Sequence[DraftTree]) -> int:
        """Returns how many nodes of each tree to verify, and sets `_promised` to their expected gain.

        A forward over a batch is as wide as its largest tree. So a further node is a further node of each tree, worth
        the mean of what it gains in all of them.
        """
        self._promised = 0.0
        if self._is_plain:
            return 0
        costs, rate, trust = self.costs, self.habits.rate, self.habits.trust
        ranked = [sorted(map(math.exp, tree.scores[1:]), reverse=True) for tree in trees]
        gains = [sum(column) / len(trees) for column in zip_longest(*ranked, fillvalue=0.0)]
        size = sum(gain >= self._least_worth * rate * costs.node / trust for gain in gains)
        if self.measured is not None:
            size = min(size, self.measured.most_nodes)
        expected = sum(gains[:size])
        if expected * trust <= self._least_worth * rate * costs.verifying(size):
            return 0
        self._promised = expected
        return size

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        self.habits.calibration.learn(tree, tokens)

    def note_round(
        self,
        nodes: int,
        emitted: float,
        forward_seconds: float | None,
        depth: int,
        draft_seconds: float,
        progress: float | None = None,
    ) -> None:
        costs, habits = self.costs, self.habits
        if self.measured is not None and forward_seconds is not None:
            self.measured.add(nodes, forward_seconds, depth, draft_seconds)
        if nodes:
            habits.accepted = TUNING.pace_fading * habits.accepted + emitted - 1.0
            habits.expected = TUNING.pace_fading * habits.expected + self._promised
        self._promised = 0.0
        progress = emitted if progress is None else progress
        time = 1.0 + costs.verifying(nodes) + costs.drafting(depth)
        lost = time
        if self._batch and self.measured is not None:  # a first draft reads the prompts too
            lost += self.measured.draft_time(depth, draft_seconds) - costs.drafting(depth)
        most = TUNING.batch_most_saved if self._batch else TUNING.most_saved
        habits.saved = min(habits.saved + progress - lost + TUNING.allowed_loss, most)
        if not self._is_plain:  # a plain round shows nothing about drafting
            newest = 1.0 - TUNING.pace_fading
            habits.tokens += newest * (progress - habits.tokens)
            habits.time += newest * (time - habits.time)


@dataclass(frozen=True)
class KindOfCall:
    """A kind of call. Equal kinds share measured costs."""

    costs_by: tuple[Any, ...]  # what costs depend on besides the target and the sizes below
    habits_by: tuple[Any, ...] = field(compare=False)  # what habits depend on besides the drafter
    depth: int  # greatest depth of a draft
    tree_size: int  # most nodes verified of a text
    rows: int = 1  # in a forward
    packed: bool = False  # whether the target multiplies by packed weights


# Learnt from calls: costs of each target by kind, and habits of each drafter by `KindOfCall.habits_by`.
_known: weakref.WeakKeyDictionary[Any, dict[KindOfCall, MeasuredCosts]] = weakref.WeakKeyDictionary()
_habits: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Habits]] = weakref.WeakKeyDictionary()


def pace_for(
    target: Any, drafter: Any, kind: KindOfCall, given: Costs | None, before: CostPace | None = None, share: float = 1.0
) -> CostPace:
    """Returns the pace of a call, starting from what earlier calls of its kind have learnt.

    Args:
        given: the user's costs; `None` to measure them.
        before: the call's pace until now, if any.
        share: share of the rows that stay, of those read until now.
    """
    if given is not None:
        pace = CostPace(kind.depth, given, kind.rows)
        if before is not None:
            pace.take_over(before)
        return pace
    known, habits = _known.setdefault(target, {}), _habits.setdefault(drafter, {})
    if kind not in known:
        former = before.measured if before is not None and share < 1.0 else None
        known[kind] = former.of_fewer(share) if former is not None else MeasuredCosts.of_rows(kind.rows)
    pace = CostPace(kind.depth, known[kind], kind.rows)
    if before is not None:
        pace.take_over(before)
    elif kind.habits_by in habits:
        pace.begin_with(habits[kind.habits_by])
    habits[kind.habits_by] = pace.habits
    return pace
