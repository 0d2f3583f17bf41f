"""How much to draft: as much as pays, by what forwards cost on this device and by what was accepted in this text.

Time is counted in forwards of the target on one token. A draft of depth K costs a part of one, a verified node a
hundredth or less, and every accepted token saves one. Three things are learnt: what forwards and drafts cost, from the
first rounds; how often a drafted token of some probability is right; and how many a round yields. None of it changes
the distribution of what is emitted, and whoever gives the costs gets the same trees in every run.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .draft_tree import DraftTree

# Lower ends of the bins of an edge's log-probability.
_BINS = (-0.05, -0.15, -0.35, -0.7, -1.1, -1.6, -2.3, -3.0, -4.0, -5.0, -6.5, -8.0)
_PRIOR_TRIALS = 64.0  # tokens that what is assumed of a bin counts for: drafters know well how sure they are
_PRIOR_ACCEPTED = 0.3  # tokens that expectations count for by themselves, beside what came of them
_PRIOR_EXPECTED = 1.5  # right tokens that the drafter's own word counts for
_MOST_TRIALS = 200.0  # that are remembered of a bin, and of all bins' expectations
_FADING = 0.85  # of the weight of earlier rounds, with each further one
_TRIALS, _MOST_ROUNDS = 24, 60  # rounds until costs are known, or are assumed
_USUAL_TREE = 0.02  # what a tree costs on CPUs beside its nodes
_TREE_SPREAD = 0.03  # how far from it that usually is
_FIXED_PART = 0.35  # of a draft's cost: reading and the head; the rest is spread over its depths
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 32  # rounds without a draft, before it is tried again


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


_ASSUMED = Costs(tree=0.05, node=0.01, draft=0.1, depth=0.05)  # where a trial found out nothing


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
        """Two digits of each: what is finer is noise, and would make trees differ from run to run."""
        plain = self.forwards.get(0, [0.0])
        trees = {nodes: times for nodes, times in self.forwards.items() if nodes > 0}
        if not trees or min(plain) <= 0.0:
            return _ASSUMED
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
class Calibration:
    """How often a drafted token is right, by the probability that the drafter gives it after its parent.

    Attributes:
        trials, hits: tokens that were compared and that were right, by bins of that probability.
        expected, right: the same over all bins, with the probabilities summed instead of the tokens counted: what is
            assumed of a bin as long as little of it was seen.
    """

    trials: list[float] = field(default_factory=lambda: [0.0] * (len(_BINS) + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (len(_BINS) + 1))
    expected: float = _PRIOR_EXPECTED
    right: float = _PRIOR_EXPECTED

    def probability(self, log_prob: float) -> float:
        place = _bin(log_prob)
        assumed = min(math.exp(log_prob) * self.right / self.expected, 1.0)
        return (self.hits[place] + _PRIOR_TRIALS * assumed) / (self.trials[place] + _PRIOR_TRIALS)

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Compares a tree with the tokens that were emitted after its root."""
        children, node = tree.children(), 0
        for token in tokens:
            for child in children[node].values():
                log_prob = tree.scores[child] - tree.scores[node]
                place = _bin(log_prob)
                self.expected += math.exp(log_prob)
                self.right += tree.tokens[child] == token
                if self.trials[place] >= _MOST_TRIALS:  # texts change
                    self.trials[place], self.hits[place] = self.trials[place] / 2, self.hits[place] / 2
                self.trials[place] += 1.0
                self.hits[place] += tree.tokens[child] == token
            if token not in children[node]:
                break
            node = children[node][token]
        if self.expected > _MOST_TRIALS:
            self.expected, self.right = self.expected / 2, self.right / 2

    def applied(self, tree: DraftTree) -> DraftTree:
        """The same tree, scored by how probable it is that its nodes are accepted."""
        scores = [0.0]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            right = self.probability(tree.scores[node] - tree.scores[parent])
            scores.append(scores[parent] + math.log(max(right, 1e-9)))
        return DraftTree(tree.tokens, tree.parents, tree.depths, tuple(scores))


def _bin(log_prob: float) -> int:
    return next((place for place, low in enumerate(_BINS) if log_prob >= low), len(_BINS))


class Pace:
    """Decides round by round how deep to draft and which nodes to verify. One for a call, all its rows together.

    Args:
        depth, tree_size: the most there may be.
        costs: if they are known or given.
        trial: finds them out otherwise.
        on_known: told of what was found.
    """

    def __init__(
        self,
        depth: int,
        tree_size: int,
        costs: Costs | None = None,
        trial: CostTrial | None = None,
        on_known: Callable[[Costs], None] | None = None,
    ) -> None:
        self.costs = costs
        self._trial = None if costs is not None else trial or CostTrial.of(tree_size, depth)
        self._on_known = on_known
        self._depth, self._tree_size = depth, tree_size
        self._calibration = Calibration()
        # Of the tokens that each depth of a draft adds, less what verifying its nodes costs: a running mean.
        self._gains = [0.5 * 0.4**d for d in range(depth)]
        self._tokens, self._time = 2.0, 1.4  # emitted in a round and its time, running means
        self._pause = self._waited = self._drafts = 0
        # Drafted tokens that were accepted of late, and that had been expected: in this tree, and in those before it.
        self._accepted, self._expected, self._promised = 0.0, 0.0, 0.0

    @property
    def measures(self) -> bool:
        """Whether rounds have to be timed."""
        return self._trial is not None

    @property
    def _trust(self) -> float:
        """What an expected token has been worth of late."""
        return min((self._accepted + _PRIOR_ACCEPTED) / (self._expected + _PRIOR_ACCEPTED), 1.5)

    @property
    def rate(self) -> float:
        """Tokens emitted in the time of a one-token forward; plain decoding has 1, so it is never less."""
        return max(self._tokens / self._time, 1.0)

    def depth(self, certain: float = 0.0) -> int:
        """How deep to draft.

        Args:
            certain: probability that the next token is among those that are proposed without a draft.
        """
        if self._trial is not None:
            return self._depth if self._trial.next_size() else 0
        assert self.costs is not None
        gain, best, chosen = 0.0, 0.0, 0
        for depth, more in enumerate(self._gains, 1):
            gain += (1.0 - certain) * more * self._trust
            worth = gain - self.rate * self.costs.drafting(depth)
            if worth > best:
                best, chosen = worth, depth
        if chosen or certain > 0.5:
            return chosen
        self._waited += 1
        if self._waited <= self._pause:
            return 0
        self._accepted, self._expected = self._accepted / 2, self._expected / 2
        self._waited, self._pause = 0, min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        return min(1, self._depth)

    def worth(self) -> float:
        """Tokens that a draft of the best depth gains of late, less what it costs; infinite while that is unknown."""
        if self.costs is None:
            return math.inf
        gain, best = 0.0, 0.0
        for depth, more in enumerate(self._gains, 1):
            gain += more * self._trust
            best = max(best, gain - self.rate * self.costs.drafting(depth))
        return best

    def scored(self, tree: DraftTree) -> DraftTree:
        """A drafted tree, scored by how probable its nodes are to be accepted."""
        return self._calibration.applied(tree)

    def weighed(self, tree: DraftTree, depth: int) -> DraftTree:
        """The same of a tree drafted to some depth just now; what each depth adds is noted."""
        tree = self.scored(tree)
        if self.costs is None:
            return tree
        least = self.rate * self.costs.node
        gains = [0.0] * depth
        for level, score in zip(tree.depths[1:], tree.scores[1:], strict=True):
            gains[level - 1] += max(math.exp(score) - least, 0.0)
        self._drafts += 1
        weight = max(1.0 - _FADING, 1.0 / (self._drafts + 1))  # of the first few their mean
        for level in range(len(self._gains)):
            if level < depth:
                self._gains[level] += weight * (gains[level] - self._gains[level])
            elif level > 0:  # not drafted: as the last one that was, on in the same ratio
                ratio = self._gains[level - 1] / self._gains[level - 2] if level > 1 and self._gains[level - 2] else 0.5
                self._gains[level] = self._gains[level - 1] * min(ratio, 0.95)
        if sum(gains) > self.rate * self.costs.drafting(depth):
            self._pause = 0
        return tree

    def cut(self, tree: DraftTree) -> DraftTree:
        """What of a tree is worth verifying."""
        if self._trial is not None:
            size = self._trial.next_size()
            return tree if size is None else tree.first(size)
        assert self.costs is not None
        least = math.log(max(self.rate * self.costs.node / self._trust, 1e-9))
        kept = tree.above(least)
        expected = kept.expected_length()
        if expected * self._trust <= self.rate * self.costs.verifying(len(kept) - 1):
            return tree.first(0)
        self._promised += expected
        return kept

    def learn(self, tree: DraftTree | None, tokens: Sequence[int]) -> None:
        """Takes what was emitted after the root of an uncut draft, as the drafter scored it."""
        if tree is not None:
            self._calibration.learn(tree, tokens)

    def timed(
        self, nodes: int, emitted: float, forward_seconds: float, depth: int, draft_seconds: float, rows: int = 1
    ) -> None:
        """Takes how a round went.

        Args:
            rows: that were drafted for.
            nodes: verified in the largest tree; emitted: tokens a row, on average.
            depth: that was drafted.
        """
        if self._trial is not None:
            self._trial.add(nodes, forward_seconds, depth, draft_seconds)
            if self._trial.next_size() is None:
                self.costs, self._trial = self._trial.costs(), None
                if self._on_known is not None:
                    self._on_known(self.costs)
            return
        assert self.costs is not None
        if nodes:
            self._accepted = _FADING * self._accepted + emitted - 1.0
            self._expected = _FADING * self._expected + self._promised / max(rows, 1)
        self._promised = 0.0
        time = 1.0 + self.costs.verifying(nodes) + self.costs.drafting(depth)
        self._tokens += (1.0 - _FADING) * (emitted - self._tokens)
        self._time += (1.0 - _FADING) * (time - self._time)


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[Costs | None, CostTrial | None]]] = (
    weakref.WeakKeyDictionary()
)


def pace_for(target: Any, kind_of_call: tuple[Any, ...], depth: int, tree_size: int, given: Costs | None) -> Pace:
    """The pace of a call, with the costs that are known of calls of its kind; a trial may take several calls.

    Args:
        kind_of_call: whatever costs depend on beside the target; hashable.
        given: goes before what was measured.
    """
    if given is not None:
        return Pace(depth, tree_size, given)
    known = _known.setdefault(target, {})
    key = (*kind_of_call, depth, tree_size)
    costs, trial = known.setdefault(key, (None, CostTrial.of(tree_size, depth)))

    def keep(found: Costs) -> None:
        known[key] = found, None

    return Pace(depth, tree_size, costs, trial, keep)
