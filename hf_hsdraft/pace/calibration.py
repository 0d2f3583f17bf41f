"""Counts how often drafted tokens are right, by the drafter's confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING


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
    bins = TUNING.calibration_bins
    return next((place for place, low in enumerate(bins) if log_prob >= low), len(bins))
