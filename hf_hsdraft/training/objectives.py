"""Training objectives: how far the drafter's distribution is from the target's (DistillSpec, section 4).

Each takes logits of the drafter and of the target over the draft vocabulary, both `[N, V']`, and returns one value for
each row, `[N]`, in nats. All but `hard_labels` are zero exactly where both distributions are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(target | drafter): cover all that the target might say."""
    return _kl(teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1))


def reverse_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(drafter | target): propose nothing that the target would not say."""
    return _kl(logits.log_softmax(dim=-1), teacher.log_softmax(dim=-1))


def jensen_shannon(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The mean of the divergences of both distributions from their even mixture; at most log 2."""
    log_p, log_q = teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    log_mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return (_kl(log_p, log_mixture) + _kl(log_q, log_mixture)) / 2


def total_variation(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Half the sum of the absolute differences: the share that rejection sampling rejects."""
    return (logits.softmax(dim=-1) - teacher.softmax(dim=-1)).abs().sum(dim=-1) / 2


def hard_labels(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's first choice, which is all that greedy decoding asks for."""
    return F.cross_entropy(logits, teacher.max(dim=-1).indices, reduction="none")


OBJECTIVES: dict[str, Objective] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "hard_labels": hard_labels,
}


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    probs = log_p.exp()
    return torch.linalg.vecdot(probs, log_p) - torch.linalg.vecdot(probs, log_q)
