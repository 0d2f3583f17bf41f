"""What forwards of the target and drafts cost on this device: found in the first rounds, put right by all later ones.

Time is counted in forwards of the target on one token.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_TRIALS, _MOST_ROUNDS = 24, 60  # rounds until costs are known, or are assumed
_USUAL_TREE = 0.02  # what a tree costs on CPUs beside its nodes
_TREE_SPREAD = 0.03  # how far from it that usually is
_FIXED_PART = 0.35  # of a draft's cost: reading and the head; the rest is spread over its depths
_FADING = 0.97  # of the weight of earlier rounds, with each further one
_PLAIN_WEIGHT = 0.2  # of the newest plain round in their running mean
_PRIOR_ROUNDS = 8  # that what the trial found counts for, with a third of the greatest size
_AGED = 24  # rounds without a plain one, until what a plain one takes may have changed
_HARDLY_FASTER = 1.15  # than plain decoding: there it has to be known well what a plain round takes


@dataclass(frozen=True)
class Costs:
    """What a round costs, in forwards of one token.

    Attributes:
        tree: of reading a tree at all; node: of each of its nodes.
        draft: of drafting at all; depth: of each depth drafted.
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


ASSUMED = Costs(tree=0.05, node=0.01, draft=0.1, depth=0.05)  # where a trial found out nothing


@dataclass
class CostTrial:
    """Finds the costs out: the first rounds verify trees of three sizes in turn, and the least times count.

    Attributes:
        sizes: nodes of the trees that are asked for; 0 is a plain step. There may be fewer nodes to verify.
        depth: of the drafts that are asked for; 0 if there is nothing that drafts.
        rounds: timed so far.
        forwards: for each number of nodes verified, the seconds of its forwards.
        draft: depth and seconds of the quickest of the deepest drafts.
    """

    sizes: tuple[int, int, int]
    depth: int
    rounds: int = 0
    forwards: dict[int, list[float]] = field(default_factory=dict)
    draft: tuple[int, float] = (0, 0.0)

    @classmethod
    def of(cls, tree_size: int, depth: int) -> CostTrial:
        return cls((tree_size, 0, max(tree_size // 3, 1)), depth)

    def next_size(self) -> int | None:
        """Nodes of the tree to verify in the next round, at most; `None` when all is known that can be."""
        known = any(self.forwards) and (self.draft[0] > 0 or self.depth == 0)
        if self.rounds >= (_TRIALS if known else _MOST_ROUNDS):
            return None
        return self.sizes[self.rounds % len(self.sizes)]

    def add(self, nodes: int, forward_seconds: float, depth: int, draft_seconds: float) -> None:
        """Takes a round that verified `nodes` after a draft of some depth."""
        self.rounds += 1
        self.forwards.setdefault(nodes, []).append(forward_seconds)
        if depth > self.draft[0] or (depth == self.draft[0] > 0 and draft_seconds < self.draft[1]):
            self.draft = depth, draft_seconds

    def costs(self) -> Costs:
        """Two digits of each; what is finer is noise."""
        plain = self.forwards.get(0, [0.0])
        trees = {nodes: times for nodes, times in self.forwards.items() if nodes > 0}
        if not trees or min(plain) <= 0.0:
            return ASSUMED
        one, repeated = min(plain), [times for times in self.forwards.values() if len(times) > 1]
        apart = sum(len(times) * (statistics.median(times) - min(times)) for times in repeated)
        noise = 0.5 * apart / max(sum(map(len, repeated)), 1) / one  # of a least time, roughly
        share = 2.0 / sum(map(len, trees.values()))
        points = [(nodes, min(times) / one - 1.0, share * len(times)) for nodes, times in trees.items()]
        tree, node = _line(points, noise)
        depth, draft = self.draft
        values = (tree, node, _FIXED_PART * draft / one, (1 - _FIXED_PART) * draft / one / max(depth, 1))
        return Costs(*(float(f"{value:.2g}") for value in values))


def _line(points: Sequence[tuple[int, float, float]], noise: float) -> tuple[float, float]:
    """What a tree costs and what each of its nodes: least squares, none below 0.

    A few noisy times tell the two apart badly, so the noisier they are, the closer the first stays to what is usual.

    Args:
        points: number of nodes, cost of the whole tree, weight.
        noise: of these costs.
    """
    usual = (max(noise, 1e-3) / _TREE_SPREAD) ** 2
    total = sum(weight for _, _, weight in points) + usual
    nodes = sum(weight * n for n, _, weight in points)
    squares = sum(weight * n * n for n, _, weight in points)
    costs = sum(weight * cost for _, cost, weight in points) + usual * _USUAL_TREE
    products = sum(weight * n * cost for n, cost, weight in points)
    node = max((total * products - nodes * costs) / (total * squares - nodes**2), 0.0)
    tree = (costs - nodes * node) / total
    return (tree, node) if tree >= 0.0 else (0.0, max(products / squares, 0.0))


@dataclass
class MeasuredCosts:
    """What rounds cost, of one kind of call: the word of a trial, and how far off it was of late.

    Least times of a few rounds are what tells the costs of trees and nodes apart on an unsteady clock. But usual ones
    may grow faster with the trees than least ones, and change with the text's length.

    Attributes:
        trial: until it has ended.
        plain: seconds of a round that verified nothing, a running mean; `None` before the first one.
        nodes, depths: verified and drafted of late, what the trial's word counts for included.
        wider, deeper: what those took beyond that word.
        since: rounds since the last plain one.
    """

    trial: CostTrial
    plain: float | None = None
    nodes: float = 0.0
    depths: float = 0.0
    wider: float = 0.0
    deeper: float = 0.0
    since: int = 0
    _found: Costs | None = None

    @classmethod
    def of(cls, tree_size: int, depth: int) -> MeasuredCosts:
        """Of trees and drafts that are no larger."""
        return cls(
            CostTrial.of(tree_size, depth), nodes=_PRIOR_ROUNDS * tree_size / 3, depths=_PRIOR_ROUNDS * depth / 3
        )

    @property
    def costs(self) -> Costs | None:
        """`None` while the trial goes on."""
        if self._found is None:
            return None
        node = self._found.node + self.wider / self.nodes
        depth = self._found.depth + (self.deeper / self.depths if self.depths else 0.0)
        return replace(self._found, node=max(node, 0.0), depth=max(depth, 0.0))

    def of_fewer(self, share: float, tree_size: int, depth: int) -> MeasuredCosts | None:
        """What rounds probably cost that read only a `share` of the rows; `None` while the trial goes on."""
        costs = self.costs
        if costs is None:
            return None
        fewer = MeasuredCosts.of(tree_size, depth)
        fewer._found = replace(costs, node=costs.node * share)
        return fewer

    def wants_plain(self, rate: float) -> bool:
        """Whether the next round had better be a plain one, for what that takes.

        Args:
            rate: tokens emitted in the time of a plain round; if that is many, it need not be known so well.
        """
        return self.plain is None or (self.plain > 0.0 and self.since >= _AGED and rate < _HARDLY_FASTER)

    def next_size(self) -> int | None:
        """Nodes of the tree that the trial would have verified, at most; `None` after it."""
        return None if self._found is not None else self.trial.next_size()

    def add(self, nodes: int, forward_seconds: float, depth: int, draft_seconds: float) -> None:
        """Takes a round that verified `nodes` after a draft of some depth."""
        if self._found is None:
            self.trial.add(nodes, forward_seconds, depth, draft_seconds)
            if self.trial.next_size() is None:
                self._found = self.trial.costs()
                self.plain = statistics.median(self.trial.forwards.get(0, [0.0]))
            return
        self.since = self.since + 1 if nodes else 0
        if nodes == 0:
            plain = self.plain or forward_seconds
            self.plain = plain + _PLAIN_WEIGHT * (min(forward_seconds, 2.0 * plain) - plain)
        if not self.plain:  # nothing to compare with, or too coarse a clock
            return
        if nodes:
            beyond = _beyond(forward_seconds / self.plain - 1.0, self._found.verifying(nodes))
            self.nodes, self.wider = _FADING * self.nodes + nodes, _FADING * self.wider + beyond
        if depth:
            beyond = _beyond(draft_seconds / self.plain, self._found.drafting(depth))
            self.depths, self.deeper = _FADING * self.depths + depth, _FADING * self.deeper + beyond


def _beyond(cost: float, said: float) -> float:
    """What something cost beyond what was said of it; very late ones were disturbed, and count as less late."""
    return min(cost, 3.0 * said + 0.5) - said
