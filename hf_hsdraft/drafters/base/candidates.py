"""The best tokens of a depth by its own logits, which heads for pairs of tokens choose among (DFlash2)."""

from __future__ import annotations

import torch


def best_of(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns where the `count` greatest of logits `[..., V]` are: `[..., V]`, bool."""
    best = logits.topk(count, dim=-1, sorted=False).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)


def biased(logits: torch.Tensor, bias: torch.Tensor, reach: torch.Tensor | None) -> torch.Tensor:
    """Returns logits `[..., V]` with a bias where `reach`, bool, is True; `None` for everywhere."""
    return logits + (bias if reach is None else bias.masked_fill(~reach, 0.0))
