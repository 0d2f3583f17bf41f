"""How often a drafted token is right, by how sure the drafter is of it: counted on the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..common.tuning import TUNING
from ..trees.draft_tree import DraftTree


@dataclass
class Calibration:
    """How often a drafted token is right, by the probability that the drafter gives it after its parent.

    Attributes:
        trials, hits: tokens that were compared and that were right, by bins of that probability.
        expected, right: the same over all bins, with the probabilities summed instead of the tokens counted: what is
            assumed of a bin as long as little of it was seen.
    """

    trials: list[float] = field(default_factory=lambda: [0.0] * (len(TUNING.calibration_bins) + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (len(TUNING.calibration_bins) + 1))
    expected: float = TUNING.calibration_prior_right
    right: float = TUNING.calibration_prior_right

    def probability(self, log_prob: float) -> float:
        place = _bin(log_prob)
        assumed = min(math.exp(log_prob) * self.right / self.expected, 1.0)
        prior = TUNING.calibration_prior
        return (self.hits[place] + prior * assumed) / (self.trials[place] + prior)

    def learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Compares a tree with the tokens that were emitted after its root."""
        children, node = tree.children(), 0
        for token in tokens:
            for child in children[node].values():
                log_prob = tree.scores[child] - tree.scores[node]
                place = _bin(log_prob)
                self.expected += math.exp(log_prob)
                self.right += tree.tokens[child] == token
                if self.trials[place] >= TUNING.calibration_most:  # texts change
                    self.trials[place], self.hits[place] = self.trials[place] / 2, self.hits[place] / 2
                self.trials[place] += 1.0
                self.hits[place] += tree.tokens[child] == token
            if token not in children[node]:
                break
            node = children[node][token]
        if self.expected > TUNING.calibration_most:
            self.expected, self.right = self.expected / 2, self.right / 2

    def applied(self, tree: DraftTree) -> DraftTree:
        """The same tree, scored by how probable it is that its nodes are accepted."""
        scores = [0.0]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            right = self.probability(tree.scores[node] - tree.scores[parent])
            scores.append(scores[parent] + math.log(max(right, 1e-9)))
        return DraftTree(tree.tokens, tree.parents, tree.depths, tuple(scores))

    def softened(self) -> Calibration:
        """The same for another text: what was counted weighs less."""
        shares = [min(TUNING.calibration_kept / trials, 1.0) if trials else 0.0 for trials in self.trials]
        share = min(TUNING.calibration_kept / self.expected, 1.0)
        return Calibration(
            [share * trials for share, trials in zip(shares, self.trials, strict=True)],
            [share * hits for share, hits in zip(shares, self.hits, strict=True)],
            share * self.expected,
            share * self.right,
        )


def _bin(log_prob: float) -> int:
    bins = TUNING.calibration_bins
    return next((place for place, low in enumerate(bins) if log_prob >= low), len(bins))
