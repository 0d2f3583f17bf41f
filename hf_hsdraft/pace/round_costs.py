"""What forwards of the target and drafts cost on this device: assumed at first, and learnt from every round.

Time is counted in plain rounds: forwards of the target on one token of each row.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from ..common.tuning import TUNING, Assumption


@dataclass(frozen=True)
class Costs:
    """What a round costs, in plain rounds.

    Attributes:
        tree: of verifying any nodes at all.
        node: of each node verified.
        draft: of drafting at all.
        depth: of each depth drafted.
    """

    tree: float
    node: float
    draft: float
    depth: float

    @classmethod
    def of(cls, node: float, depth: float) -> Costs:
        """From the costs of a node and of a depth, the rest in proportion."""
        return cls(0.0, node, depth, depth)

    def verifying(self, nodes: int) -> float:
        return self.tree + self.node * nodes if nodes else 0.0

    def drafting(self, depth: int) -> float:
        return self.draft + self.depth * depth if depth else 0.0

    def round(self, nodes: int, depth: int) -> float:
        return 1.0 + self.verifying(nodes) + self.drafting(depth)


@dataclass
class Line:
    """A cost that grows by units: `start + each * units`, by least squares over measured rounds.

    Earlier rounds fade. The assumptions count as measurements do, by their spread.
    """

    start: Assumption
    each: Assumption
    _weight: float = 0.0
    _units: float = 0.0
    _squares: float = 0.0
    _costs: float = 0.0
    _products: float = 0.0

    def add(self, units: int, cost: float) -> None:
        """Takes the cost of a round. A very late one was disturbed, and counts as less late."""
        start, each = self.found()
        cost = min(cost, TUNING.late_factor * (start + each * units) + TUNING.late_rounds)
        fading = TUNING.cost_fading
        self._weight = fading * self._weight + 1.0
        self._units = fading * self._units + units
        self._squares = fading * self._squares + units**2
        self._costs = fading * self._costs + cost
        self._products = fading * self._products + units * cost

    def found(self) -> tuple[float, float]:
        """`start` and `each`; neither is negative."""
        of_start, of_each = ((TUNING.cost_noise / one.spread) ** 2 for one in (self.start, self.each))
        weight, squares = self._weight + of_start, self._squares + of_each
        costs, products = self._costs + of_start * self.start.value, self._products + of_each * self.each.value
        each = max((weight * products - self._units * costs) / (weight * squares - self._units**2), 0.0)
        start = (costs - self._units * each) / weight
        return (start, each) if start >= 0.0 else (0.0, max(products / squares, 0.0))


@dataclass
class MeasuredCosts:
    """What rounds cost, of one kind of call.

    Attributes:
        verifying: of nodes; drafting: of depths.
        plain: seconds of a plain round, a running mean; `None` before the first one.
        widest: number of nodes in the largest tree that was timed.
    """

    verifying: Line = field(default_factory=lambda: Line(TUNING.tree_cost, TUNING.node_cost))
    drafting: Line = field(default_factory=lambda: Line(TUNING.draft_cost, TUNING.depth_cost))
    plain: float | None = None
    widest: int = 0
    _plain_seconds: list[float] = field(default_factory=list)  # of the first few plain rounds
    _since: int = 0  # rounds since the last plain one

    @classmethod
    def of_rows(cls, rows: int) -> MeasuredCosts:
        """For a batch: a node there is one of each row."""
        return cls(Line(TUNING.tree_cost, TUNING.node_cost.at(TUNING.node_cost.value * rows)))

    def of_fewer(self, share: float) -> MeasuredCosts:
        """What is assumed of rounds that read only a `share` of the rows."""
        costs = self.costs
        verifying = Line(TUNING.tree_cost.at(costs.tree), TUNING.node_cost.at(costs.node * share))
        drafting = Line(TUNING.draft_cost.at(costs.draft), TUNING.depth_cost.at(costs.depth))
        return MeasuredCosts(verifying, drafting, widest=self.widest)

    @property
    def costs(self) -> Costs:
        return Costs(*self.verifying.found(), *self.drafting.found())

    @property
    def most_nodes(self) -> int:
        """Nodes that may be verified next: trees grow step by step, so no one dear tree is verified unawares."""
        return max(TUNING.first_nodes, TUNING.node_growth * self.widest)

    def wants_plain(self, rate: float) -> bool:
        """Whether the next round had better be a plain one, to see how long it takes.

        Args:
            rate: tokens emitted in the time of a plain round; where that is many, it need not be known so well.
        """
        if self.plain is not None and self.plain <= 0.0:  # too coarse a clock
            return False
        count = len(self._plain_seconds)
        if count < TUNING.most_plain:
            return count < TUNING.first_plain or self._since >= TUNING.between_plain
        return self._since >= TUNING.plain_aged and rate < TUNING.hardly_faster

    def add(self, nodes: int, forward_seconds: float, depth: int, draft_seconds: float) -> None:
        """Takes a round that verified `nodes` nodes after a draft of depth `depth`."""
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
