"""Training objectives: how far the drafter's distribution q is from the target's p.

A divergence takes logits of the drafter and of the target over the draft vocabulary, both `[N, V']`, and returns one
value for each row, `[N]`, in nats; zero where both distributions are equal. Where columns stand for all of the
vocabulary, it is their weighted sum (see `Candidates`). The divergences are from DistillSpec, section 4;
`methods/losses.py` has further ones. `ce_tv` aims at the acceptance of rejection sampling, 1 - TV(p, q).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ...core.methods import Registry

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(target | drafter): cover all that the target might say."""
    return kl(teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1))


def total_variation(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Half the sum of the absolute differences: the share that rejection sampling rejects."""
    return (logits.softmax(dim=-1) - teacher.softmax(dim=-1)).abs().sum(dim=-1) / 2


@dataclass(frozen=True)
class Objective:
    """A divergence, mixed with the cross-entropy with the target's first choice, all that greedy decoding asks for."""

    divergence: Divergence | None  # see above; `None` where the cross-entropy is all
    ce_share: float = 0.0  # share of the cross-entropy, 0 to 1

    def __call__(self, logits: torch.Tensor, teacher: torch.Tensor, best: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the value of each row, `[N]`.

        `best` `[N]`, int64, are the columns of the target's first choices; `None` for the largest of `teacher`.
        """
        if self.divergence is None:
            return hard_labels(logits, teacher, best)
        if not self.ce_share:
            return self.divergence(logits, teacher)
        entropy = hard_labels(logits, teacher, best)
        return self.ce_share * entropy + (1 - self.ce_share) * self.divergence(logits, teacher)


def hard_labels(logits: torch.Tensor, teacher: torch.Tensor, best: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy with the target's first choice `best`, see `Objective`."""
    return F.cross_entropy(logits, teacher.max(dim=-1).indices if best is None else best, reduction="none")


OBJECTIVES: Registry[Objective] = Registry(
    "divergence",
    {
        "forward_kl": Objective(forward_kl),
        "hard_labels": Objective(None),
        # The loss of DSpark, as the package speculators has it. DeepSpec takes the cross-entropy with the text's token
        # and the whole L1 distance, not half of it: its second part weighs twice as much at the same share.
        "ce_tv": Objective(total_variation, 0.1),
    },
)


@dataclass(frozen=True)
class WholeLoss:
    """A method's objective that compares all depths of a chain at once, for drafters that learn by no other."""

    fields: Mapping[str, Any]  # configuration fields of such a drafter
    # Raises a ValueError where such a configuration and training arguments do not go together
    check: Callable[[Any, Any], None]
    # Makes the drafter's `loss_function`, of training arguments, drafter, the weights that it borrows, the target's
    # output rows of the draft vocabulary, and the number of logits to compute at a time
    made: Callable[[Any, Any, Any, torch.Tensor, int], Any]


WHOLE_LOSSES: Registry[WholeLoss] = Registry("objective")


def only_objective(config: Any) -> str:
    """Name of the whole loss that is the only objective for a drafter's configuration; empty if there are others."""
    for name, loss in WHOLE_LOSSES.items():
        if all(getattr(config, field, None) == value for field, value in loss.fields.items()):
            return name
    return ""


def objective_of(name: str, ce_share: float | None = None) -> Objective:
    """Returns an objective by its name in `OBJECTIVES`.

    A `ce_share` out of range, or for another objective than `ce_tv` and `kl_ce`, is a ValueError.
    """
    objective = OBJECTIVES.get(name)
    if ce_share is None:
        return OBJECTIVES[name]
    if objective is None or not objective.ce_share:
        raise ValueError(
            f"ce_share={ce_share} is invalid with objective={name!r}: leave it out, or take 'ce_tv' or 'kl_ce'"
        )
    if not 0.0 <= ce_share <= 1.0:
        raise ValueError(f"ce_share={ce_share} is invalid: expected 0 to 1")
    return replace(objective, ce_share=ce_share)


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns KL(p | q) `[N]` of log-probabilities `[N, V']`."""
    probs = log_p.exp()
    return torch.linalg.vecdot(probs, log_p) - torch.linalg.vecdot(probs, log_q)


_POWER = 0.75  # of frequencies in the sample: rare tokens are drawn more often than they occur


@dataclass(frozen=True)
class Columns:
    """Columns to compare."""

    index: torch.Tensor  # `[C]`, int64, columns of the draft vocabulary; the first `sure` ones weigh 1
    log_weight: torch.Tensor  # `[C]`, float32
    sure: int


@dataclass(frozen=True)
class Candidates:
    """Chooses columns that stand for all of the vocabulary in the loss, whose head is most of a training step.

    Compared are the columns that the target finds probable for a prediction, and a sample of the others. A column v of
    the sample was drawn with probability pi(v) and weighs w(v) = 1 / pi(v), the others weigh 1 (Horvitz and Thompson).
    So the weighted sum estimates a sum over the vocabulary without bias: the normaliser of the drafter's softmax
    (sampled softmax; Bengio and Senecal 2008), and any divergence that is a sum over tokens. It is enough to add log
    w(v) to the logits of drafter and target, as the weights cancel in each ratio of p and q. The logarithm of the
    estimated normaliser is biased by about minus half its relative variance.
    """

    count: int  # of the target's most probable tokens that are compared, at each position
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
