"""Columns of a draft vocabulary that stand for all of it in the loss, whose head is most of a training step.

Compared are the columns that the target finds probable for a prediction, and a sample of the others. A column v of the
sample was drawn with probability pi(v) and weighs w(v) = 1 / pi(v), the others weigh 1 (Horvitz and Thompson). So the
weighted sum estimates a sum over the vocabulary without bias: the normaliser of the drafter's softmax (sampled softmax;
Bengio and Senecal 2008), and any divergence that is a sum over tokens. It is enough to add log w(v) to the logits of
drafter and target, as the weights cancel in each ratio of p and q. The logarithm of the estimated normaliser is biased
by about minus half its relative variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_POWER = 0.75  # of frequencies in the sample: rare tokens are drawn more often than they occur


@dataclass(frozen=True)
class Columns:
    """Columns to compare."""

    index: torch.Tensor  # `[C]`, int64, columns of the draft vocabulary; the first `sure` ones weigh 1
    log_weight: torch.Tensor  # `[C]`, float32
    sure: int


@dataclass(frozen=True)
class Candidates:
    """Chooses columns."""

    # Number of the target's most probable tokens at each position that are compared, for all predictions that are
    # compared together
    count: int
    inclusion: torch.Tensor  # `[V']`, float32, probability with which each column is drawn besides

    @classmethod
    def of(cls, count: int, drawn: int, token_counts: torch.Tensor) -> Candidates:
        """Draws about `drawn` columns, by how often tokens occur: `token_counts` `[V']`."""
        frequency = (token_counts.float() + 1.0) ** _POWER
        inclusion, share = torch.zeros_like(frequency), frequency / frequency.sum()
        for _ in range(8):  # what is certain leaves its share to the others
            certain = inclusion >= 1.0
            room = max(drawn - int(certain.sum()), 0)
            rest = torch.where(certain, 0.0, share)
            inclusion = torch.where(certain, 1.0, room * rest / rest.sum().clamp(min=1e-9)).clamp(max=1.0)
        return cls(count, inclusion)

    def columns(self, likely: torch.Tensor) -> Columns:
        """Returns the columns for predictions whose likely ones are `likely` `[U, count]`, see `likely_columns`."""
        known = torch.zeros_like(self.inclusion, dtype=torch.bool)
        known[likely.flatten().long()] = True
        drawn = torch.rand_like(self.inclusion) < self.inclusion
        sure, others = torch.nonzero(known).squeeze(-1), torch.nonzero(drawn & ~known).squeeze(-1)
        weight = torch.cat([self.inclusion.new_zeros(len(sure)), -self.inclusion[others].log()])
        return Columns(torch.cat([sure, others]), weight, len(sure))
