"""The pace: how deep to draft and how many nodes to verify, so that decoding takes the least time.

The unit of time is a plain round: a forward of the target on one token of each row. An accepted token saves one; a
draft and each verified node cost a part of one. Two things are learnt: what forwards and drafts cost on this device
(`MeasuredCosts`), and how often the drafts of a text are right (`Habits`). A text begins with the habits of the
drafter's last text. The pace never changes the distribution of the emitted text. Where the user gives the costs,
nothing is measured or remembered, and each run drafts the same trees.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import neg
from typing import Any

from ..core.draft_tree import DraftTree
from ..core.kept import kept_with
from . import tuning


@dataclass(frozen=True)
class Costs:
    """What the parts of a round cost, in plain rounds."""

    tree: float  # verifying any nodes at all
    node: float  # each node verified
    draft: float  # drafting at all
    depth: float  # each depth drafted

    def verifying(self, nodes: int) -> float:
        return self.tree + self.node * nodes if nodes else 0.0

    def drafting(self, depth: int) -> float:
        return self.draft + self.depth * depth if depth else 0.0


@dataclass
class Line:
    """A cost `start + each * units`, estimated by least squares over measured rounds.

    Later rounds weigh more. The two assumptions count as measurements, with more weight the smaller their spread.
    """

    start: tuning.Assumption
    each: tuning.Assumption
    _sums: tuple[float, ...] = (0.0,) * 5  # weighted sums of 1, units, units**2, cost, units * cost

    def add(self, units: int, cost: float) -> None:
        """Adds the cost of a round, clipped where it is far above the estimate: something disturbed such a round."""
        start, each = self.estimate()
        cost = min(cost, tuning.LATE_FACTOR * (start + each * units) + tuning.LATE_ROUNDS)
        of_round = (1.0, units, units**2, cost, units * cost)
        self._sums = tuple(tuning.COST_FADING * total + new for total, new in zip(self._sums, of_round, strict=True))

    def estimate(self) -> tuple[float, float]:
        """Returns `start` and `each`, neither negative."""
        weight, units, squares, costs, products = self._sums
        start_weight, each_weight = ((tuning.COST_NOISE / assumed.spread) ** 2 for assumed in (self.start, self.each))
        weight, costs = weight + start_weight, costs + start_weight * self.start.value
        squares, products = squares + each_weight, products + each_weight * self.each.value
        each = max((weight * products - units * costs) / (weight * squares - units**2), 0.0)
        start = (costs - units * each) / weight
        return (start, each) if start >= 0.0 else (0.0, max(products / squares, 0.0))


@dataclass
class MeasuredCosts:
    """What the rounds of one kind of call cost: verifying by number of nodes, drafting by depth."""

    verifying: Line = field(default_factory=lambda: Line(tuning.TREE_COST, tuning.NODE_COST))
    drafting: Line = field(default_factory=lambda: Line(tuning.DRAFT_COST, tuning.DEPTH_COST))
    plain: float | None = None  # seconds of a plain round, a running mean
    widest: int = 0  # nodes of the largest tree timed
    _plain_seconds: list[float] = field(default_factory=list)  # of the first few plain rounds
    _since: int = 0  # rounds since the last plain one

    @classmethod
    def of_rows(cls, rows: int) -> MeasuredCosts:
        """Returns the prior for a batch, where a further node is a further node of each row.

        The more rows a plain round has, the nearer a node comes to its whole time: then a machine is busy.
        """
        if rows == 1:
            return cls()
        node = tuning.ROW_COST * rows / (1.0 + tuning.ROW_COST * (rows - 1))
        return cls(Line(tuning.TREE_COST, tuning.NODE_COST.at(node)))

    def of_fewer(self, share: float) -> MeasuredCosts:
        """Returns the prior for rounds that read only this share of the rows."""
        costs = self.costs
        verifying = Line(tuning.TREE_COST.at(costs.tree), tuning.NODE_COST.at(costs.node * share))
        drafting = Line(tuning.DRAFT_COST.at(costs.draft), tuning.DEPTH_COST.at(costs.depth))
        return MeasuredCosts(verifying, drafting, widest=self.widest)

    @property
    def costs(self) -> Costs:
        return Costs(*self.verifying.estimate(), *self.drafting.estimate())

    @property
    def most_nodes(self) -> int:
        """Greatest number of nodes to verify next. Trees grow in steps, so none costs far more than expected."""
        return max(tuning.FIRST_NODES, tuning.NODE_GROWTH * self.widest)

    def wants_plain(self, rate: float) -> bool:
        """Returns whether to time a plain round next. At a high `rate` a rough time will do."""
        if self.plain is not None and self.plain <= 0.0:  # the clock is too coarse
            return False
        count = len(self._plain_seconds)
        if count < tuning.MOST_PLAIN:
            return count < tuning.FIRST_PLAIN or self._since >= tuning.BETWEEN_PLAIN
        return self._since >= tuning.PLAIN_AGED and rate < tuning.HARDLY_FASTER

    def draft_time(self, depth: int, seconds: float) -> float:
        """Returns how long a draft took, in plain rounds; far above what is expected, something disturbed it."""
        expected = self.costs.drafting(depth)
        latest = tuning.LATE_FACTOR * expected + tuning.LATE_ROUNDS
        return min(max(seconds / self.plain, expected), latest) if self.plain and depth else expected

    def add(self, nodes: int, forward_seconds: float, depth: int, draft_seconds: float) -> None:
        """Adds a round that verified `nodes` nodes after a draft of depth `depth`."""
        self._since = self._since + 1 if nodes else 0
        if nodes == 0:
            self._add_plain(forward_seconds)
        if not self.plain:  # nothing to compare with
            return
        if nodes:
            self.verifying.add(nodes, forward_seconds / self.plain - 1.0)
            self.widest = max(self.widest, nodes)
        if depth:
            self.drafting.add(depth, draft_seconds / self.plain)

    def _add_plain(self, seconds: float) -> None:
        if len(self._plain_seconds) < tuning.MOST_PLAIN:
            self._plain_seconds.append(seconds)
            self.plain = statistics.median(self._plain_seconds)
        else:
            assert self.plain is not None
            self.plain += tuning.PLAIN_WEIGHT * (min(seconds, tuning.LATEST_PLAIN * self.plain) - self.plain)


@dataclass
class Calibration:
    """How often a drafted token is right, by the probability that the drafter gives it after its parent.

    Tokens are counted in bins of that probability. While a bin has few, its prior comes from the totals of all bins.
    """

    trials: list[float] = field(default_factory=lambda: [0.0] * (len(tuning.CALIBRATION_BINS) + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (len(tuning.CALIBRATION_BINS) + 1))
    expected: float = tuning.CALIBRATION_PRIOR_RIGHT  # sum of the probabilities of all compared tokens
    right: float = tuning.CALIBRATION_PRIOR_RIGHT  # number of right tokens

    def probability(self, log_prob: float) -> float:
        """Returns how often a token with this log-probability after its parent is right."""
        place = _bin(log_prob)
        assumed = min(math.exp(log_prob) * self.right / self.expected, 1.0)
        prior = tuning.CALIBRATION_PRIOR
        return (self.hits[place] + prior * assumed) / (self.trials[place] + prior)

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Compares a tree with the tokens emitted after its root."""
        children, node = tree.children(), 0
        for token in tokens:
            for drafted, child in children[node].items():
                log_prob = tree.scores[child] - tree.scores[node]
                place = _bin(log_prob)
                self.expected += math.exp(log_prob)
                self.right += drafted == token
                if self.trials[place] >= tuning.CALIBRATION_MOST:  # texts change, so old tokens fade
                    self.trials[place], self.hits[place] = self.trials[place] / 2, self.hits[place] / 2
                self.trials[place] += 1.0
                self.hits[place] += drafted == token
            if token not in children[node]:
                break
            node = children[node][token]
        if self.expected > tuning.CALIBRATION_MOST:
            self.expected, self.right = self.expected / 2, self.right / 2

    def applied(self, tree: DraftTree) -> DraftTree:
        """Returns the tree with calibrated scores."""
        scores = [0.0]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            right = self.probability(tree.scores[node] - tree.scores[parent])
            scores.append(scores[parent] + math.log(max(right, 1e-9)))
        return replace(tree, scores=tuple(scores))

    def softened(self) -> Calibration:
        """Returns the counts with less weight, for another text."""
        shares = [tuning.CALIBRATION_KEPT / max(trials, tuning.CALIBRATION_KEPT) for trials in self.trials]
        share = tuning.CALIBRATION_KEPT / max(self.expected, tuning.CALIBRATION_KEPT)
        return Calibration(
            [share * trials for share, trials in zip(shares, self.trials, strict=True)],
            [share * hits for share, hits in zip(shares, self.hits, strict=True)],
            share * self.expected,
            share * self.right,
        )


def _bin(log_prob: float) -> int:
    """Place of the first bin whose lower end is not above this; bins descend."""
    return bisect_left(tuning.CALIBRATION_BINS, -log_prob, key=neg)


@dataclass
class Habits:
    """How well the drafts of a text have done. Means and sums give more weight to later rounds."""

    calibration: Calibration
    gains: list[float]  # by depth: mean number of tokens that it adds, less the cost of verifying its nodes
    drafts: int = 0  # drafts behind `gains`
    tokens: float = tuning.FIRST_TOKENS  # emitted in a round, mean
    time: float = tuning.FIRST_TIME  # of a round, mean, in plain rounds
    accepted: float = 0.0  # drafted tokens accepted
    expected: float = 0.0  # drafted tokens expected to be accepted
    saved: float = tuning.FIRST_SAVED  # plain rounds saved recently, less what drafting cost; see `CostPace`
    pause: int = 0  # rounds until the next trial

    @classmethod
    def assumed(cls, depth: int) -> Habits:
        """Returns the prior for a drafter's first text, or first batch."""
        gains = [tuning.FIRST_GAIN * tuning.GAIN_RATIO**d for d in range(depth)]
        return cls(Calibration(), gains)

    def of_depth(self, depth: int) -> Habits:
        """Returns these habits for another depth. An unknown gain is a fixed part of the one before."""
        gains = self.gains[:depth]
        while len(gains) < depth:
            gains.append(tuning.UNKNOWN_GAIN_RATIO * gains[-1] if gains else 0.0)
        return replace(self, gains=gains)

    def for_another_text(self) -> Habits:
        """Returns the habits with less weight, as a prior for the next text."""
        return replace(
            self,
            calibration=self.calibration.softened(),
            gains=list(self.gains),
            drafts=min(self.drafts, tuning.KEPT_DRAFTS),
            accepted=tuning.KEPT_TRUST * self.accepted,
            expected=tuning.KEPT_TRUST * self.expected,
        )

    @property
    def trust(self) -> float:
        """Number of accepted tokens for each expected one."""
        return min((self.accepted + tuning.TRUST_PRIOR) / (self.expected + tuning.TRUST_PRIOR), tuning.MOST_TRUST)

    @property
    def rate(self) -> float:
        """Tokens emitted in the time of a plain round; at least 1, the rate of plain decoding."""
        return max(self.tokens / self.time, 1.0)


class CostPace:
    """Chooses the depth and the nodes that save most time. One pace serves all texts of a call.

    A batch ends with its last text. So the texts furthest behind decide, and the others draft and verify as much.

    Expectations may be wrong. So the pace keeps an account of the time that drafting has saved and cost, over all texts
    of the drafter (`Habits.saved`). In debt, a draft has to promise more than its cost, in proportion to the debt.
    Each round pays a small part of the debt off. A trial after a pause has to be paid for beforehand, and a text begins
    with the pause that the last one came to. A batch of `rows` texts, which a draft costs more and gains less, saves up
    less to lose.

    Each round calls `plan` before its draft, `fit` after it and `learn` at its end.
    """

    def __init__(self, depth: int, costs: Costs | MeasuredCosts, rows: int = 1) -> None:
        self.habits, self._batch = Habits.assumed(depth), rows > 1
        self.measured = costs if isinstance(costs, MeasuredCosts) else None
        self._depth, self._costs = depth, costs
        self._pause = 0  # rounds to wait before the next draft
        self._waited = 0
        self._is_plain = False  # this round drafts nothing, to time it
        self._promised = 0.0  # expected gain of this round's trees, in tokens
        self._drafted: Mapping[int, DraftTree] = {}  # this round's whole drafts, by text

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
        """Begins a round and returns how deep to draft. Rounds without a draft are counted here.

        `certain` is the probability that the next token is among those proposed without a draft.
        """
        habits = self.habits
        self._is_plain = self.measured is not None and self.measured.wants_plain(habits.rate)
        if self._is_plain:
            return 0
        chosen = self._best_depth(certain)
        if chosen or certain > tuning.CERTAIN:
            return chosen
        if habits.saved < self.costs.drafting(1):  # no trials in debt
            return 0
        self._waited += 1
        if self._waited <= self._pause:
            return 0
        # The text may have changed, so what was accepted and expected before counts half.
        habits.accepted, habits.expected = habits.accepted / 2, habits.expected / 2
        self._waited, self._pause = 0, min(max(2 * self._pause, tuning.FIRST_PAUSE), tuning.LONGEST_PAUSE)
        habits.pause = self._pause
        return min(1, self._depth)

    @property
    def _least_worth(self) -> float:
        """How many times its cost a draft has to promise."""
        return 1.0 + tuning.WORTH_OF_DEBT * max(-self.habits.saved, 0.0)

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

    def fit(
        self,
        drafted: Mapping[int, DraftTree],
        depth: int,
        deciding: Sequence[int],
        join: Callable[[Mapping[int, DraftTree]], dict[int, DraftTree]],
    ) -> dict[int, DraftTree]:
        """Returns the trees that are worth verifying, by text.

        Args:
            drafted: drafts of depth `depth` with the drafter's scores; empty if nothing was drafted.
            deciding: the texts that the batch waits for. They decide, and the others verify as much.
            join: returns drafts, which are now scored by how probable it is that their nodes are accepted, together
                with what was proposed for nothing.
        """
        self._drafted = drafted
        scored = {row: self.habits.calibration.applied(tree) for row, tree in drafted.items()}
        if scored:
            self._note_gains([scored[row] for row in deciding], depth)
        trees = join(scored)
        size = self._best_size([trees[row] for row in deciding])
        return {row: tree.first(size) for row, tree in trees.items()}

    def _note_gains(self, trees: Sequence[DraftTree], depth: int) -> None:
        habits, count, gains = self.habits, len(trees), self._gains(trees, depth)
        habits.drafts += count
        weight = max(1.0 - tuning.PACE_FADING**count, count / (habits.drafts + 1))  # the first few drafts count alike
        known = habits.gains
        for level in range(len(known)):
            if level < depth:
                known[level] += weight * (gains[level] - known[level])
            elif level > 0:  # not drafted: extrapolated from the two depths before
                before = known[level - 2] if level > 1 else 0.0
                ratio = known[level - 1] / before if before else tuning.UNKNOWN_GAIN_RATIO
                known[level] = known[level - 1] * min(ratio, tuning.MOST_GAIN_RATIO)
        if sum(gains) > habits.rate * self.costs.drafting(depth):
            self._pause = habits.pause = 0

    def _gains(self, trees: Sequence[DraftTree], depth: int) -> list[float]:
        """Returns for each depth how many tokens its nodes add, less what verifying them costs.

        A node adds the probability that it is accepted. As in `_best_size`, all trees keep equally many nodes, the best
        ones, while a further node of each tree pays. The gains are means over the trees.
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
        if len(trees) == 1 or not total:  # with one text only `_best_size` counts the tree's cost
            return gains
        share = max(1.0 - rate * costs.tree / total, 0.0)  # a tree that is not verified gains nothing
        return [share * gain for gain in gains]

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

    def learn(
        self,
        emitted: Mapping[int, Sequence[int]],  # tokens of each text
        nodes: int,  # number of nodes verified in the largest tree
        mean: float,  # number of tokens emitted by the deciding texts, mean
        progress: float,  # number of tokens by which the shortest text has grown
        depth: int,  # depth that was drafted; 0 for no draft
        draft_seconds: float,  # time of the draft
        forward_seconds: float | None,  # time of the target's forward; `None` if it did something else too
    ) -> None:
        """Learns from how a round went."""
        for row, tree in self._drafted.items():
            self.habits.calibration.learn(tree, emitted[row])
        self._drafted = {}
        costs, habits = self.costs, self.habits
        if self.measured is not None and forward_seconds is not None:
            self.measured.add(nodes, forward_seconds, depth, draft_seconds)
        if nodes:
            habits.accepted = tuning.PACE_FADING * habits.accepted + mean - 1.0
            habits.expected = tuning.PACE_FADING * habits.expected + self._promised
        self._promised = 0.0
        time = 1.0 + costs.verifying(nodes) + costs.drafting(depth)
        lost = time
        if self._batch and self.measured is not None:  # a first draft reads the prompts too
            lost += self.measured.draft_time(depth, draft_seconds) - costs.drafting(depth)
        most = tuning.BATCH_MOST_SAVED if self._batch else tuning.MOST_SAVED
        habits.saved = min(habits.saved + progress - lost + tuning.ALLOWED_LOSS, most)
        if not self._is_plain:  # a plain round shows nothing about drafting
            newest = 1.0 - tuning.PACE_FADING
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
    known: dict[KindOfCall, MeasuredCosts] = kept_with(target, "costs", dict)
    habits: dict[tuple[Any, ...], Habits] = kept_with(drafter, "habits", dict)
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
