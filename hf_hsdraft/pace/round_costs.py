"""Costs of target forwards and of drafts on this device: assumed at first, then measured.

The unit of time is a plain round: a forward of the target on one token of each row.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

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
        """Returns the prior for a batch, where a further node is a further node of each row."""
        return cls(Line(TUNING.tree_cost, Assumption(TUNING.node_cost.value * rows, TUNING.node_cost.spread)))

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
