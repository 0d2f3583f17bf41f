"""Counts on a text how often drafted tokens are right, by how sure the drafter is of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..trees.draft_tree import DraftTree

# Lower ends of the bins of an edge's log-probability.
_BINS = (-0.05, -0.15, -0.35, -0.7, -1.1, -1.6, -2.3, -3.0, -4.0, -5.0, -6.5, -8.0)
_PRIOR_TRIALS = 64.0  # tokens that what is assumed of a bin counts for: drafters know well how sure they are
_PRIOR_EXPECTED = 1.5  # right tokens that the drafter's own word counts for
_MOST_TRIALS = 200.0  # that are remembered of a bin, and of all bins' expectations
_KEPT_TRIALS = 24.0  # tokens that each bin of an earlier text counts for in the next one


@dataclass
class Calibration:
    """How often a drafted token is right, by the probability that the drafter gives it after its parent.

    The tokens are counted in bins of that probability. As long as a bin has few, the totals of all bins say what is
    assumed of it.

    Attributes:
        trials: for each bin, the number of tokens that were compared with the text.
        hits: for each bin, the number of these that were right.
        expected: sum of the probabilities of all tokens that were compared.
        right: number of all tokens that were right.
    """

    trials: list[float] = field(default_factory=lambda: [0.0] * (len(_BINS) + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (len(_BINS) + 1))
    expected: float = _PRIOR_EXPECTED
    right: float = _PRIOR_EXPECTED

    def probability(self, log_prob: float) -> float:
        """Returns how often a token is right that the drafter gives this log-probability after its parent."""
        place = _bin(log_prob)
        assumed = min(math.exp(log_prob) * self.right / self.expected, 1.0)
        return (self.hits[place] + _PRIOR_TRIALS * assumed) / (self.trials[place] + _PRIOR_TRIALS)

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Compares a tree with the tokens that were emitted after its root."""
        children, node = tree.children(), 0
        for token in tokens:
            for drafted, child in children[node].items():
                log_prob = tree.scores[child] - tree.scores[node]
                place = _bin(log_prob)
                self.expected += math.exp(log_prob)
                self.right += drafted == token
                if self.trials[place] >= _MOST_TRIALS:  # texts change, so earlier tokens come to weigh less
                    self.trials[place], self.hits[place] = self.trials[place] / 2, self.hits[place] / 2
                self.trials[place] += 1.0
                self.hits[place] += drafted == token
            if token not in children[node]:
                break
            node = children[node][token]
        if self.expected > _MOST_TRIALS:
            self.expected, self.right = self.expected / 2, self.right / 2

    def applied(self, tree: DraftTree) -> DraftTree:
        """Returns the same tree with scores that say how probable it is that its nodes are accepted."""
        scores = [0.0]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            right = self.probability(tree.scores[node] - tree.scores[parent])
            scores.append(scores[parent] + math.log(max(right, 1e-9)))
        return replace(tree, scores=tuple(scores))

    def softened(self) -> Calibration:
        """Returns the same counts with less weight, for another text."""
        shares = [_KEPT_TRIALS / max(trials, _KEPT_TRIALS) for trials in self.trials]
        share = _KEPT_TRIALS / max(self.expected, _KEPT_TRIALS)
        return Calibration(
            [share * trials for share, trials in zip(shares, self.trials, strict=True)],
            [share * hits for share, hits in zip(shares, self.hits, strict=True)],
            share * self.expected,
            share * self.right,
        )


def _bin(log_prob: float) -> int:
    """Returns the index of the bin that a log-probability belongs to."""
    return next((place for place, low in enumerate(_BINS) if log_prob >= low), len(_BINS))
