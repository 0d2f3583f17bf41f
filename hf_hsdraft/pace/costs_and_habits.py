"""What the pace learns: what forwards and drafts cost on this device, and how well the drafts of a text do.

The unit of time is a plain round: a forward of the target on one token of each row.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import neg

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING, Assumption


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

    start: Assumption
    each: Assumption
    _sums: tuple[float, ...] = (0.0,) * 5  # weighted sums of 1, units, units**2, cost, units * cost

    def add(self, units: int, cost: float) -> None:
        """Adds the cost of a round, clipped where it is far above the estimate: something disturbed such a round."""
        start, each = self.estimate()
        cost = min(cost, TUNING.late_factor * (start + each * units) + TUNING.late_rounds)
        of_round = (1.0, units, units**2, cost, units * cost)
        self._sums = tuple(TUNING.cost_fading * total + new for total, new in zip(self._sums, of_round, strict=True))

    def estimate(self) -> tuple[float, float]:
        """Returns `start` and `each`, neither negative."""
        weight, units, squares, costs, products = self._sums
        start_weight, each_weight = ((TUNING.cost_noise / assumed.spread) ** 2 for assumed in (self.start, self.each))
        weight, costs = weight + start_weight, costs + start_weight * self.start.value
        squares, products = squares + each_weight, products + each_weight * self.each.value
        each = max((weight * products - units * costs) / (weight * squares - units**2), 0.0)
        start = (costs - units * each) / weight
        return (start, each) if start >= 0.0 else (0.0, max(products / squares, 0.0))


@dataclass
class MeasuredCosts:
    """What the rounds of one kind of call cost: verifying by number of nodes, drafting by depth."""

    verifying: Line = field(default_factory=lambda: Line(TUNING.tree_cost, TUNING.node_cost))
    drafting: Line = field(default_factory=lambda: Line(TUNING.draft_cost, TUNING.depth_cost))
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
        node = TUNING.row_cost * rows / (1.0 + TUNING.row_cost * (rows - 1))
        return cls(Line(TUNING.tree_cost, TUNING.node_cost.at(node)))

    def of_fewer(self, share: float) -> MeasuredCosts:
        """Returns the prior for rounds that read only this share of the rows."""
        costs = self.costs
        verifying = Line(TUNING.tree_cost.at(costs.tree), TUNING.node_cost.at(costs.node * share))
        drafting = Line(TUNING.draft_cost.at(costs.draft), TUNING.depth_cost.at(costs.depth))
        return MeasuredCosts(verifying, drafting, widest=self.widest)

    @property
    def costs(self) -> Costs:
        return Costs(*self.verifying.estimate(), *self.drafting.estimate())

    @property
    def most_nodes(self) -> int:
        """Greatest number of nodes to verify next. Trees grow in steps, so none costs far more than expected."""
        return max(TUNING.first_nodes, TUNING.node_growth * self.widest)

    def wants_plain(self, rate: float) -> bool:
        """Returns whether to time a plain round next. At a high `rate` a rough time will do."""
        if self.plain is not None and self.plain <= 0.0:  # the clock is too coarse
            return False
        count = len(self._plain_seconds)
        if count < TUNING.most_plain:
            return count < TUNING.first_plain or self._since >= TUNING.between_plain
        return self._since >= TUNING.plain_aged and rate < TUNING.hardly_faster

    def draft_time(self, depth: int, seconds: float) -> float:
        """Returns how long a draft took, in plain rounds; far above what is expected, something disturbed it."""
        expected = self.costs.drafting(depth)
        latest = TUNING.late_factor * expected + TUNING.late_rounds
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
        if len(self._plain_seconds) < TUNING.most_plain:
            self._plain_seconds.append(seconds)
            self.plain = statistics.median(self._plain_seconds)
        else:
            assert self.plain is not None
            self.plain += TUNING.plain_weight * (min(seconds, TUNING.latest_plain * self.plain) - self.plain)


@dataclass
class Calibration:
    """How often a drafted token is right, by the probability that the drafter gives it after its parent.

    Tokens are counted in bins of that probability. While a bin has few, its prior comes from the totals of all bins.
    """

    trials: list[float] = field(default_factory=lambda: [0.0] * (len(TUNING.calibration_bins) + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (len(TUNING.calibration_bins) + 1))
    expected: float = TUNING.calibration_prior_right  # sum of the probabilities of all compared tokens
    right: float = TUNING.calibration_prior_right  # number of right tokens

    def probability(self, log_prob: float) -> float:
        """Returns how often a token with this log-probability after its parent is right."""
        place = _bin(log_prob)
        assumed = min(math.exp(log_prob) * self.right / self.expected, 1.0)
        prior = TUNING.calibration_prior
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
                if self.trials[place] >= TUNING.calibration_most:  # texts change, so old tokens fade
                    self.trials[place], self.hits[place] = self.trials[place] / 2, self.hits[place] / 2
                self.trials[place] += 1.0
                self.hits[place] += drafted == token
            if token not in children[node]:
                break
            node = children[node][token]
        if self.expected > TUNING.calibration_most:
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
        shares = [TUNING.calibration_kept / max(trials, TUNING.calibration_kept) for trials in self.trials]
        share = TUNING.calibration_kept / max(self.expected, TUNING.calibration_kept)
        return Calibration(
            [share * trials for share, trials in zip(shares, self.trials, strict=True)],
            [share * hits for share, hits in zip(shares, self.hits, strict=True)],
            share * self.expected,
            share * self.right,
        )


def _bin(log_prob: float) -> int:
    """Place of the first bin whose lower end is not above this; bins descend."""
    return bisect_left(TUNING.calibration_bins, -log_prob, key=neg)


@dataclass
class Habits:
    """How well the drafts of a text have done. Means and sums give more weight to later rounds."""

    calibration: Calibration
    gains: list[float]  # by depth: mean number of tokens that it adds, less the cost of verifying its nodes
    drafts: int = 0  # drafts behind `gains`
    tokens: float = TUNING.first_tokens  # emitted in a round, mean
    time: float = TUNING.first_time  # of a round, mean, in plain rounds
    accepted: float = 0.0  # drafted tokens accepted
    expected: float = 0.0  # drafted tokens expected to be accepted
    saved: float = TUNING.first_saved  # plain rounds saved recently, less what drafting cost; see `CostPace`
    pause: int = 0  # rounds until the next trial

    @classmethod
    def assumed(cls, depth: int) -> Habits:
        """Returns the prior for a drafter's first text, or first batch."""
        gains = [TUNING.first_gain * TUNING.gain_ratio**d for d in range(depth)]
        return cls(Calibration(), gains)

    def of_depth(self, depth: int) -> Habits:
        """Returns these habits for another depth. An unknown gain is a fixed part of the one before."""
        gains = self.gains[:depth]
        while len(gains) < depth:
            gains.append(TUNING.unknown_gain_ratio * gains[-1] if gains else 0.0)
        return replace(self, gains=gains)

    def for_another_text(self) -> Habits:
        """Returns the habits with less weight, as a prior for the next text."""
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
        """Number of accepted tokens for each expected one."""
        return min((self.accepted + TUNING.trust_prior) / (self.expected + TUNING.trust_prior), TUNING.most_trust)

    @property
    def rate(self) -> float:
        """Tokens emitted in the time of a plain round; at least 1, the rate of plain decoding."""
        return max(self.tokens / self.time, 1.0)
