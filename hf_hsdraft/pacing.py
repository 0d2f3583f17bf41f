"""How much to draft: as much as pays, by what forwards cost on this device and by what was accepted in this text.

Time is counted in forwards of the target on one token. A draft of depth K costs a part of one, a verified node a
hundredth or less, and every accepted token saves one. Three things are learnt: what forwards and drafts cost, see
`round_costs`; how often a drafted token of some probability is right; and how many a round yields. None of it changes
the distribution of what is emitted, and whoever gives the costs gets the same trees in every run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from .draft_tree import DraftTree
from .round_costs import Costs, MeasuredCosts

# Lower ends of the bins of an edge's log-probability.
_BINS = (-0.05, -0.15, -0.35, -0.7, -1.1, -1.6, -2.3, -3.0, -4.0, -5.0, -6.5, -8.0)
_PRIOR_TRIALS = 64.0  # tokens that what is assumed of a bin counts for: drafters know well how sure they are
_PRIOR_ACCEPTED = 0.3  # tokens that expectations count for by themselves, beside what came of them
_PRIOR_EXPECTED = 1.5  # right tokens that the drafter's own word counts for
_MOST_TRIALS = 200.0  # that are remembered of a bin, and of all bins' expectations
_FADING = 0.85  # of the weight of earlier rounds, with each further one
_SLOWER = 1.1  # than without packed weights, and more than noise: there nothing is packed
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 32  # rounds without a draft, before it is tried again


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

    A batch is done when its last row is, so the rows that are furthest behind decide: `weighed`, `size` and `timed` are
    told of theirs alone. The other rows draft and verify as much.

    Args:
        depth: the most there may be.
        costs: as given, or as they are measured here.
    """

    def __init__(self, depth: int, costs: Costs | MeasuredCosts) -> None:
        self.measured = costs if isinstance(costs, MeasuredCosts) else None
        self._given = costs if isinstance(costs, Costs) else None
        self._depth = depth
        self._calibration = Calibration()
        # Of the tokens that each depth of a draft adds, less what verifying its nodes costs: a running mean.
        self._gains = [0.5 * 0.4**d for d in range(depth)]
        self._tokens, self._time = 2.0, 1.4  # emitted in a round and its time, running means
        self._pause = self._waited = self._drafts = 0
        self._steps_plainly = False  # in this round, to see what that takes
        # Drafted tokens that were accepted of late, and that had been expected: in this tree, and in those before it.
        self._accepted, self._expected, self._promised = 0.0, 0.0, 0.0

    def take_over(self, before: Pace) -> None:
        """Goes on with what another pace has learnt of the text."""
        self._calibration, self._drafts = before._calibration, before._drafts
        gains = before._gains[: self._depth]
        self._gains = gains + [gains[-1] * 0.5 ** (d + 1) if gains else 0.0 for d in range(self._depth - len(gains))]
        self._tokens, self._time = before._tokens, before._time
        self._pause, self._waited = before._pause, before._waited
        self._accepted, self._expected = before._accepted, before._expected

    @property
    def measures(self) -> bool:
        """Whether rounds have to be timed."""
        return self.measured is not None

    @property
    def costs(self) -> Costs | None:
        """`None` as long as nothing is known of them."""
        return self._given if self.measured is None else self.measured.costs

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
        costs = self.costs
        if costs is None:
            assert self.measured is not None
            return self._depth if self.measured.next_size() else 0
        self._steps_plainly = self.measured is not None and self.measured.wants_plain(self.rate)
        if self._steps_plainly:
            return 0
        gain, best, chosen = 0.0, 0.0, 0
        for depth, more in enumerate(self._gains, 1):
            gain += (1.0 - certain) * more * self._trust
            worth = gain - self.rate * costs.drafting(depth)
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
        costs = self.costs
        if costs is None:
            return math.inf
        gain, best = 0.0, 0.0
        for depth, more in enumerate(self._gains, 1):
            gain += more * self._trust
            best = max(best, gain - self.rate * costs.drafting(depth))
        return best

    def scored(self, tree: DraftTree) -> DraftTree:
        """A drafted tree, scored by how probable its nodes are to be accepted."""
        return self._calibration.applied(tree)

    def weighed(self, tree: DraftTree, depth: int) -> DraftTree:
        """The same of a tree drafted to some depth just now; what each depth adds is noted."""
        tree, costs = self.scored(tree), self.costs
        if costs is None:
            return tree
        least = self.rate * costs.node
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
        if sum(gains) > self.rate * costs.drafting(depth):
            self._pause = 0
        return tree

    def size(self, trees: Sequence[DraftTree]) -> int:
        """How many nodes of each tree are worth verifying in one forward, best first.

        A forward over a batch is as wide as its largest tree, so a further node is one of every tree.
        """
        costs = self.costs
        if costs is None:
            assert self.measured is not None
            return self.measured.next_size() or 0
        ranked = [sorted(map(math.exp, tree.scores[1:]), reverse=True) for tree in trees]
        gains = [sum(column) / len(trees) for column in zip_longest(*ranked, fillvalue=0.0)]
        least = self.rate * costs.node / self._trust
        size = 0 if self._steps_plainly else sum(gain >= least for gain in gains)
        expected = sum(gains[:size])
        if expected * self._trust <= self.rate * costs.verifying(size):
            size = 0
        self._promised = expected if size else 0.0
        return size

    def learn(self, tree: DraftTree | None, tokens: Sequence[int]) -> None:
        """Takes what was emitted after the root of an uncut draft, as the drafter scored it."""
        if tree is not None:
            self._calibration.learn(tree, tokens)

    def timed(self, nodes: int, emitted: float, forward_seconds: float, depth: int, draft_seconds: float) -> None:
        """Takes how a round went.

        Args:
            nodes: verified in the largest tree; emitted: tokens a row that decides, on average.
            depth: that was drafted.
        """
        costs = self.costs
        if self.measured is not None:
            self.measured.add(nodes, forward_seconds, depth, draft_seconds)
        if costs is None:
            return
        if nodes:
            self._accepted = _FADING * self._accepted + emitted - 1.0
            self._expected = _FADING * self._expected + self._promised
        self._promised = 0.0
        self._tokens += (1.0 - _FADING) * (emitted - self._tokens)
        self._time += (1.0 - _FADING) * (costs.round(nodes, depth) - self._time)


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], MeasuredCosts]] = weakref.WeakKeyDictionary()


def pace_for(
    target: Any,
    kind_of_call: tuple[Any, ...],
    depth: int,
    tree_size: int,
    given: Costs | None,
    before: Pace | None = None,
    share: float = 1.0,
    packed: bool = False,
) -> Pace:
    """The pace of a call, with the costs that are known of calls of its kind; a trial may take several calls.

    Args:
        kind_of_call: whatever costs depend on beside the target; hashable.
        given: goes before what was measured.
        before: of the same call until now; share: what part of the rows that were read then is read now.
        packed: whether the target's weights are. Calls pack theirs soon: so until more is known, what holds of packed
            ones is taken to hold of the others.
    """
    if given is not None:
        pace = Pace(depth, given)
    else:
        known, key = _known.setdefault(target, {}), (*kind_of_call, depth, tree_size)
        own = (*key, packed)
        measured = known.get(own)
        if measured is None or measured.costs is None:
            fewer = before.measured if before is not None and share < 1.0 else None
            like = fewer or (None if packed else known.get((*key, True)))
            alike = like.of_fewer(share, tree_size, depth) if like else None
            measured = known[own] = alike or measured or MeasuredCosts.of(tree_size, depth)
        pace = Pace(depth, measured)
    if before is not None:
        pace.take_over(before)
    return pace


def slower_packed(target: Any, kind_of_call: tuple[Any, ...], depth: int, tree_size: int) -> bool:
    """Whether plain rounds take longer with packed weights, even the quickest: the layout may not suit a processor."""
    known, key = _known.get(target, {}), (*kind_of_call, depth, tree_size)
    packed, apart = known.get((*key, True)), known.get((*key, False))
    if packed is None or packed.costs is None or apart is None or apart.plain is None:
        return False
    return min(packed.trial.forwards.get(0, [0.0])) > _SLOWER * apart.plain
