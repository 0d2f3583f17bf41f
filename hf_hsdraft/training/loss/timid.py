"""Initialises a drafter's head from the target's, scaled down.

An untrained drafter gives noise. If its logits were as large as the target's, it would take hundreds of steps to
unlearn that.
"""

from __future__ import annotations

import torch
from torch import nn

_HEAD, _UP = 0.3, 0.2


@torch.no_grad()
def start_timidly(
    norm: torch.Tensor,
    rows: torch.Tensor,
    finals: torch.Tensor,
    up: torch.Tensor | None = None,
    head: nn.Linear | None = None,
) -> None:
    """Initialises a drafter of the target's width from the target, so that it can use the head from the first step on.

    The final norm gets the scale of the target's final hidden states. A bias of low rank gets the leading directions of
    the target's head.

    Args:
        norm: `[D]`, weight of the final norm, which is changed.
        rows: `[V', D]`, the target's output rows of the draft vocabulary.
        finals: `[N, D]`, float32, some final hidden states of the target.
        up: `[V', r]`, weight of the last product of a bias of rank r, which is changed; `None` for no such bias.
        head: the drafter's own head, which becomes the target's; `None` if it has none.
    """
    norm.copy_(finals.pow(2).mean(dim=0).sqrt())
    rows = rows.to(norm.device, torch.float32)
    if head is not None:
        head.weight.copy_(rows)
    if up is not None:
        # After the norm's scale, states vary equally in all directions, so the head is scaled in the same way.
        scaled = rows * norm
        directions = torch.linalg.eigh(scaled.T @ scaled).eigenvectors.flip(dims=[1])  # the leading directions first
        leading = scaled @ directions[:, : up.shape[1]]
        up[:, : leading.shape[1]].copy_(_UP * leading)
    norm.mul_(_HEAD)
