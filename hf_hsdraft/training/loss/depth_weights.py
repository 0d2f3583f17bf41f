"""Weights of predictions in the loss: coefficients `[S, K]` for S chains of K depths.

Arguments: `weights` of depths, `[K]`, or of predictions, `[S, K]`; `valid` `[S, K]`, bool, True where the loss counts a
prediction; `count` `[K]`, number of predictions at each depth.
"""

from __future__ import annotations

import torch

DEPTH_WEIGHTINGS = ("fixed", "by-prediction", "d-pace")
_FLOOR = 0.5


def mean_of_depths(weights: torch.Tensor, valid: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns coefficients that make the loss the weighted mean, over the depths, of the mean of each depth.

    `weights` `[K]` are divided by their sum.
    """
    return valid * (weights / weights.sum() / count.clamp(min=1))


def mean_of_predictions(weights: torch.Tensor, valid: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns coefficients that make the loss the sum of weighted predictions, divided by the number of predictions."""
    return valid * (weights / count.sum().clamp(min=1))


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
    """Returns 1 where greedy decoding would reach a depth, else 0: all depths before it were right (SpecBlock).

    `right` `[S, K]`, bool, says where the drafter's first choice is the target's.
    """
    passed = torch.where(valid, right, True).to(torch.float32).cumprod(dim=1)
    return torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], dim=1)
