"""Divergences of DistillSpec (section 4), LK losses and FastVLM, which gained nothing here over those of the core.

`nla` and `lk_hybrid` aim at the acceptance of rejection sampling, alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q).
"""

from __future__ import annotations

import math

import torch

from ..training.loss.objectives import OBJECTIVES, Objective, forward_kl, kl, total_variation

_LK_DECAY = 3.0


def reverse_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(drafter | target): propose nothing that the target would not say."""
    return kl(logits.log_softmax(dim=-1), teacher.log_softmax(dim=-1))


def jensen_shannon(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean divergence of both distributions from their even mixture; at most log 2."""
    log_p, log_q = teacher.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    log_mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return (kl(log_p, log_mixture) + kl(log_q, log_mixture)) / 2


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
    return share * kl(log_p, log_q) + (1 - share) * (1 - alpha)


def log_acceptance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns log alpha `[N]`: rejection sampling accepts a token drawn from q with probability alpha.

    It is summed in logarithms, so that it is finite where p and q hardly overlap. `log_p` and `log_q`, `[N, V']`, are
    log-probabilities of target and drafter within the draft vocabulary.
    """
    return torch.minimum(log_p, log_q).logsumexp(dim=-1)


OBJECTIVES["reverse_kl"] = Objective(reverse_kl)
OBJECTIVES["jensen_shannon"] = Objective(jensen_shannon)
OBJECTIVES["total_variation"] = Objective(total_variation)
OBJECTIVES["kl_ce"] = Objective(forward_kl, 0.5)  # two of the three parts of FastVLM's loss
OBJECTIVES["nla"] = Objective(nla)
OBJECTIVES["lk_hybrid"] = Objective(lk_hybrid)
