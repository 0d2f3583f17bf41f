"""What forwards of the target and drafts cost on this device. The costs are assumed at first, and then measured.

The unit of time is a plain round: a forward of the target on one token of each row.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

_FADING = 0.95  # of the weight of earlier rounds, with each further one
_NOISE = 0.15  # standard deviation of one measured time, in plain rounds
_PLAIN_WEIGHT = 0.2  # of the newest plain round in their running mean
_FIRST_PLAIN = 2  # plain rounds before anything is drafted
_MOST_PLAIN = 8  # plain rounds that are asked for, whatever drafting gains
_BETWEEN_PLAIN = 8  # rounds between two of those
_AGED = 24  # rounds after which the time of a plain round may have changed
_HARDLY_FASTER = 1.15  # than plain decoding: below that, the time of a plain round has to be known well
_FIRST_NODES = 4  # verified at most in the first tree; later trees have at most twice as many as one before had
_LATE = 3.0, 0.5  # times longer than expected, and plain rounds beyond that: a later time counts as this much


@dataclass(frozen=True)
class Costs:
    """What the parts of a round cost, in plain rounds.

    Attributes:
        tree: cost of verifying any nodes at all.
        node: cost of each node verified.
        draft: cost of drafting at all.
        depth: cost of each depth drafted.
    """

    tree: float
    node: float
    draft: float
    depth: float

    def verifying(self, nodes: int) -> float:
        """Returns what it costs to verify so many nodes."""
        return self.tree + self.node * nodes if nodes else 0.0

    def drafting(self, depth: int) -> float:
        """Returns what a draft of this depth costs."""
        return self.draft + self.depth * depth if depth else 0.0


@dataclass(frozen=True)
class Assumption:
    """What is assumed of a number before it is measured, and by how much it may be wrong, a standard deviation."""

    value: float
    spread: float


# From runs on x86 CPUs: a tree costs 0 to 0.1 beside its nodes, a node 0.005 to 0.4, a draft of depth 6 0.2 to 0.5.
_TREE, _NODE = Assumption(0.03, 0.1), Assumption(0.01, 0.05)
_DRAFT, _DEPTH = Assumption(0.1, 0.1), Assumption(0.05, 0.05)


@dataclass
class Line:
    """A cost `start + each * units`, estimated by least squares over measured rounds.

    Later rounds weigh more. The two assumptions weigh as measurements do, the more the smaller their spread is.
    """

    start: Assumption
    each: Assumption
    _sums: tuple[float, ...] = (0.0,) * 5  # weighted sums of 1, units, units**2, cost, and units * cost

    def add(self, units: int, cost: float) -> None:
        """Adds the cost of a round. Something disturbed a round that is very late, so it counts as less late."""
        start, each = self.estimate()
        factor, beyond = _LATE
        cost = min(cost, factor * (start + each * units) + beyond)
        of_round = (1.0, units, units**2, cost, units * cost)
        self._sums = tuple(_FADING * total + new for total, new in zip(self._sums, of_round, strict=True))

    def estimate(self) -> tuple[float, float]:
        """Returns `start` and `each`. Neither is negative."""
        weight, units, squares, costs, products = self._sums
        start_weight, each_weight = ((_NOISE / assumed.spread) ** 2 for assumed in (self.start, self.each))
        weight, costs = weight + start_weight, costs + start_weight * self.start.value
        squares, products = squares + each_weight, products + each_weight * self.each.value
        each = max((weight * products - units * costs) / (weight * squares - units**2), 0.0)
        start = (costs - units * each) / weight
        return (start, each) if start >= 0.0 else (0.0, max(products / squares, 0.0))


@dataclass
class MeasuredCosts:
    """What the rounds of one kind of call cost.

    Attributes:
        verifying: cost of verifying, by number of nodes.
        drafting: cost of a draft, by depth.
        plain: seconds of a plain round, a running mean; `None` before the first one.
        widest: number of nodes in the largest tree that was timed.
    """

    verifying: Line = field(default_factory=lambda: Line(_TREE, _NODE))
    drafting: Line = field(default_factory=lambda: Line(_DRAFT, _DEPTH))
    plain: float | None = None
    widest: int = 0
    _plain_seconds: list[float] = field(default_factory=list)  # seconds of the first few plain rounds
    _since: int = 0  # number of rounds since the last plain one

    @classmethod
    def of_rows(cls, rows: int) -> MeasuredCosts:
        """Returns what is assumed of a batch. There a further node is a further node of each row."""
        return cls(Line(_TREE, Assumption(_NODE.value * rows, _NODE.spread)))

    def of_fewer(self, share: float) -> MeasuredCosts:
        """Returns what is assumed of rounds that read only this share of the rows."""
        costs = self.costs
        verifying = Line(Assumption(costs.tree, _TREE.spread), Assumption(costs.node * share, _NODE.spread))
        drafting = Line(Assumption(costs.draft, _DRAFT.spread), Assumption(costs.depth, _DEPTH.spread))
        return MeasuredCosts(verifying, drafting, widest=self.widest)

    @property
    def costs(self) -> Costs:
        """The costs as they are estimated now."""
        return Costs(*self.verifying.estimate(), *self.drafting.estimate())

    @property
    def most_nodes(self) -> int:
        """Greatest number of nodes to verify next. Trees grow step by step, so no tree is far dearer than expected."""
        return max(_FIRST_NODES, 2 * self.widest)

    def wants_plain(self, rate: float) -> bool:
        """Returns whether the next round should be a plain one, to see how long it takes.

        Args:
            rate: number of tokens emitted in the time of a plain round. Where it is high, a rough time will do.
        """
        if self.plain is not None and self.plain <= 0.0:  # the clock is too coarse
            return False
        count = len(self._plain_seconds)
        if count < _MOST_PLAIN:
            return count < _FIRST_PLAIN or self._since >= _BETWEEN_PLAIN
        return self._since >= _AGED and rate < _HARDLY_FASTER

    def add(self, nodes: int, forward_seconds: float, depth: int, draft_seconds: float) -> None:
        """Adds a round that verified `nodes` nodes after a draft of depth `depth`."""
        self._since = self._since + 1 if nodes else 0
        if nodes == 0:
            self._add_plain(forward_seconds)
        if not self.plain:  # there is nothing to compare with
            return
        if nodes:
            self.verifying.add(nodes, forward_seconds / self.plain - 1.0)
            self.widest = max(self.widest, nodes)
        if depth:
            self.drafting.add(depth, draft_seconds / self.plain)

    def _add_plain(self, seconds: float) -> None:
        if len(self._plain_seconds) < _MOST_PLAIN:
            self._plain_seconds.append(seconds)
            self.plain = statistics.median(self._plain_seconds)
        else:
            assert self.plain is not None
            self.plain += _PLAIN_WEIGHT * (min(seconds, 2.0 * self.plain) - self.plain)
