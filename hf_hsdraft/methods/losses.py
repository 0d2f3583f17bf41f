"""Divergences of DistillSpec (section 4), LK losses and FastVLM, which gained nothing here over those of the core, and
weights of predictions by how the drafter itself would fare: D-PACE, and the depths that greedy decoding reaches. Then
distances of drafted states from the target's: a regression at the start, and the cosine distance of FastVLM.

`nla` and `lk_hybrid` aim at the acceptance of rejection sampling, alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q).

The weights of a chain's first depth need the last depth's. So all logits are computed once more beforehand, which takes
another product with the drafter's head and the target's for each prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..core.checks import demand
from ..training.loop.arguments import TRAINING_OPTIONS, TrainingOption
from ..training.loss.chains import ChainLabels
from ..training.loss.loss import WEIGHTINGS, Term, Total
from ..training.loss.objectives import OBJECTIVES, Objective, forward_kl, hard_labels, kl, total_variation

_LK_DECAY, _FLOOR = 3.0, 0.5
_FADED = 500  # steps, by default


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


def d_pace(probabilities: torch.Tensor, valid: torch.Tensor, floor: float = _FLOOR) -> torch.Tensor:
    """Returns weights by the drafter's own estimate of how far its chains are accepted (D-PACE).

    With s_j = (1 - floor) q_j(y_j) + floor at depth j, and s_j = 1 where nothing is predicted, a chain reaches depth m
    with P_m = prod_{j <= m} s_j. The weight of depth k is w_k = sum_{m >= k} P_m. With a floor of 0, the gradient of
    sum_k w_k (-log q_k(y_k)) is that of -sum_m P_m, minus the expected number of accepted tokens.

    Args:
        probabilities: `[S, K]`, the drafter's probability q_j(y_j) of each label. They need no gradients.
        floor: between 0 and 1. It keeps the weights of deep predictions up while the drafter is still bad.

    Returns:
        `[S, K]`, between 0 and K.
    """
    accepted = torch.where(valid, (1 - floor) * probabilities + floor, 1.0)
    return accepted.cumprod(dim=1).flip(1).cumsum(dim=1).flip(1)


def reached(right: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Returns 1 where greedy decoding would reach a depth (SpecBlock), by `right` `[S, K]`: all before were right."""
    passed = torch.where(valid, right, True).to(torch.float32).cumprod(dim=1)
    return torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], dim=1)


@torch.no_grad()
def _foreseen(total: Total, place: torch.Tensor, labels: ChainLabels) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the drafter's probabilities of `hard_labels` `[S, K]`, and whether they are its first choices."""

    def score(
        logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probability = hard_labels(logits, teacher, best).neg().exp()
        right = chosen == best
        return probability.sum(), torch.stack([probability, right.to(probability.dtype)], dim=-1)

    kind = place.device.type
    # Parameters that are cast here, without gradients, must not stand in for those that need them.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        _, found = total(replace(labels, measured=True), score)
    known = found.new_ones(labels.valid.numel(), 2)
    known[place] = found
    probability, right = known.unbind(dim=-1)
    return probability.view_as(labels.valid), right.view_as(labels.valid) > 0


def _weight_of(name: str, distance: Callable[..., torch.Tensor]) -> TrainingOption:
    """The weight of a distance of drafted states from the target's final ones. That of the regression falls to 0."""

    def made(args: Any, weight: float) -> Term:
        steps = args.method_options.get("regression_steps", _FADED) if name == "regression_weight" else math.inf

        def added(drafted: torch.Tensor, goals: torch.Tensor, shares: torch.Tensor, step: int) -> torch.Tensor:
            return weight * max(0.0, 1.0 - step / max(steps, 1)) * (distance(drafted, goals) * shares).sum()

        return Term(of_states=added)

    return TrainingOption(float, lambda args, value: demand(value >= 0, name, value, "expected 0 or more"), 0.0, made)


def _smooth_l1(drafted: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(drafted, goals, reduction="none").float().mean(dim=-1)


def _cosine(drafted: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    return 1 - F.cosine_similarity(drafted.float(), goals.float(), dim=-1)


WEIGHTINGS["d-pace"] = Term(lambda total, place, labels: d_pace(_foreseen(total, place, labels)[0], labels.valid))
_REACHED = Term(lambda total, place, labels: reached(_foreseen(total, place, labels)[1], labels.valid))
TRAINING_OPTIONS["valid_prefix"] = TrainingOption(bool, default=False, term=lambda args, value: _REACHED)
TRAINING_OPTIONS["regression_weight"] = _weight_of("regression_weight", _smooth_l1)
TRAINING_OPTIONS["regression_steps"] = TrainingOption(int, default=_FADED)
TRAINING_OPTIONS["cosine_weight"] = _weight_of("cosine_weight", _cosine)
