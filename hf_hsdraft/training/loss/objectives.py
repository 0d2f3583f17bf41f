"""Training objectives: how far the drafter's distribution q is from the target's p.

A divergence takes logits of the drafter and of the target over the draft vocabulary, both `[N, V']`, and returns one
value for each row, `[N]`, in nats. It is zero exactly where both distributions are equal. Where columns stand for all
of the vocabulary, the logarithm of a column's weight is added to both logits, and each divergence is the weighted sum
over the columns (see `candidates`).

The divergences are from DistillSpec, section 4. `nla`, `lk_hybrid` and `ce_tv` aim at the acceptance of rejection
sampling, alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q), which `log_acceptance` defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ...core.methods import Registry

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CE_SHARES = {"ce_tv": 0.1, "kl_ce": 0.5}  # default shares of the cross-entropy
_LK_DECAY = 3.0


def forward_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(target | drafter): cover all that the target might say."""
    return _kl(teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1))


def reverse_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(drafter | target): propose nothing that the target would not say."""
    return _kl(logits.log_softmax(dim=-1), teacher.log_softmax(dim=-1))


def jensen_shannon(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean divergence of both distributions from their even mixture; at most log 2."""
    log_p, log_q = teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    log_mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return (_kl(log_p, log_mixture) + _kl(log_q, log_mixture)) / 2


def total_variation(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Half the sum of the absolute differences: the share that rejection sampling rejects."""
    return (logits.softmax(dim=-1) - teacher.softmax(dim=-1)).abs().sum(dim=-1) / 2


def nla(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """-log alpha; its sum over a chain is minus the logarithm of the chance that all of it is accepted (LK losses)."""
    return -log_acceptance(teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1))


def lk_hybrid(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """`forward_kl` where little is accepted, `total_variation` where much is (LK losses).

    The divergence weighs lambda = exp(-3 alpha), the total variation 1 - alpha weighs 1 - lambda. Each row has its own
    lambda, which gets no gradient. SpecForge takes one lambda, by the mean alpha of a batch.
    """
    log_p, log_q = teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    alpha = log_acceptance(log_p, log_q).exp()
    share = (-_LK_DECAY * alpha.detach()).exp()
    return share * _kl(log_p, log_q) + (1 - share) * (1 - alpha)


def log_acceptance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns log alpha `[N]`: rejection sampling accepts a token drawn from q with probability alpha.

    It is summed in logarithms, so that it is finite where p and q hardly overlap. `log_p` and `log_q`, `[N, V']`, are
    log-probabilities of target and drafter within the draft vocabulary.
    """
    return torch.minimum(log_p, log_q).logsumexp(dim=-1)


@dataclass(frozen=True)
class Objective:
    """A divergence, mixed with the cross-entropy with the target's first choice, all that greedy decoding asks for.

    Attributes:
        divergence: see above; `None` where the cross-entropy is all.
        ce_share: share of the cross-entropy, 0 to 1.
    """

    divergence: Divergence | None
    ce_share: float = 0.0

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


OBJECTIVES: dict[str, Objective] = {
    "forward_kl": Objective(forward_kl),
    "reverse_kl": Objective(reverse_kl),
    "jensen_shannon": Objective(jensen_shannon),
    "total_variation": Objective(total_variation),
    "hard_labels": Objective(None),
    # Two of the three parts of FastVLM's loss.
    "kl_ce": Objective(forward_kl, CE_SHARES["kl_ce"]),
    # The loss of DSpark, as the package speculators has it. DeepSpec takes the cross-entropy with the text's token and
    # the whole L1 distance, not half of it: its second part weighs twice as much at the same share.
    "ce_tv": Objective(total_variation, CE_SHARES["ce_tv"]),
    "nla": Objective(nla),
    "lk_hybrid": Objective(lk_hybrid),
}


@dataclass(frozen=True)
class WholeLoss:
    """A method's objective that compares all depths of a chain at once, for drafters that learn by no other.

    Attributes:
        fields: configuration fields of such a drafter.
        check: raises a ValueError where such a configuration and training arguments do not go together.
        made: makes the drafter's `loss_function`, of training arguments, drafter, the weights that it borrows, the
            target's output rows of the draft vocabulary, and the number of logits to compute at a time.
    """

    fields: Mapping[str, Any]
    check: Callable[[Any, Any], None]
    made: Callable[[Any, Any, Any, torch.Tensor, int], Any]


WHOLE_LOSSES: Registry[WholeLoss] = Registry("objective")


def objective_of(name: str, ce_share: float | None = None) -> Objective:
    """Returns an objective by its name in `OBJECTIVES`.

    A `ce_share` out of range, or for another objective than `ce_tv` and `kl_ce`, is a ValueError.
    """
    if ce_share is None:
        return OBJECTIVES[name]
    if name not in CE_SHARES:
        raise ValueError(
            f"ce_share={ce_share} is invalid with objective={name!r}: leave it out, or take 'ce_tv' or 'kl_ce'"
        )
    if not 0.0 <= ce_share <= 1.0:
        raise ValueError(f"ce_share={ce_share} is invalid: expected 0 to 1")
    return replace(OBJECTIVES[name], ce_share=ce_share)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    probs = log_p.exp()
    return torch.linalg.vecdot(probs, log_p) - torch.linalg.vecdot(probs, log_q)
