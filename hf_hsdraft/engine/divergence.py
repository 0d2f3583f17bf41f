"""Where two texts of a target diverge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Divergence:
    """The first difference between two texts."""

    step: int  # index of the first new token that differs
    margin: float | None  # the target's top-1/top-2 logit difference there, in one plain forward; None if sampled

    def __str__(self) -> str:
        if self.margin is None:
            return f"no: differs from new token {self.step}"
        return f"no: differs from new token {self.step}, where the target's top-1/top-2 margin is {self.margin:.1e}"


@torch.inference_mode()
def first_divergence(target: Any, prompt_length: int, plain: torch.Tensor, other: torch.Tensor) -> Divergence | None:
    """Compares two outputs of `generate()`, each `[1, length]`. Returns `None` if they are equal."""
    shared = min(plain.shape[1], other.shape[1])
    differing = torch.nonzero(plain[0, :shared] != other[0, :shared]).flatten().tolist()
    if not differing and plain.shape[1] == other.shape[1]:
        return None
    first = differing[0] if differing else shared
    logits = target(plain[:, :first], logits_to_keep=1, use_cache=False).logits[0, -1].float()
    best = logits.topk(2).values
    return Divergence(first - prompt_length, float(best[0] - best[1]))
