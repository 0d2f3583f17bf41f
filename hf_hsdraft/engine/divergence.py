"""Where two texts of a target diverge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.misreading import computing_dtype


def tie_margin(dtype: torch.dtype) -> float:
    """The greatest top-1/top-2 logit difference that rounding may turn round.

    In half precision two spacings of numbers from 16 to 32, as large as logits are: 0.25 in bfloat16.
    """
    return max(1e-3, 32 * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Divergence:
    """The first difference between two texts."""

    step: int  # index of the first new token that differs
    margin: float | None  # the target's top-1/top-2 logit difference there, in one plain forward; None if sampled
    near: float = tie_margin(torch.float32)  # `tie_margin` of the dtype in which the logits were computed

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin <= self.near

    def __str__(self) -> str:
        if self.margin is None:
            return f"no: differs from new token {self.step}"
        margin = f"the target's top-1/top-2 margin is {self.margin:.1e}"
        return f"no: differs from new token {self.step}, where {margin}{', a tie' if self.is_tie else ''}"


@torch.inference_mode()
def first_divergence(target: Any, prompt_length: int, plain: torch.Tensor, other: torch.Tensor) -> Divergence | None:
    """Compares two outputs of `generate()`, each `[1, length]`. Returns `None` if they are equal."""
    shared = min(plain.shape[1], other.shape[1])
    differing = torch.nonzero(plain[0, :shared] != other[0, :shared]).flatten().tolist()
    if not differing and plain.shape[1] == other.shape[1]:
        return None
    first = differing[0] if differing else shared
    logits = target(plain[:, :first], logits_to_keep=1, use_cache=False).logits[0, -1]
    best = logits.float().topk(2).values
    near = tie_margin(computing_dtype(logits, target.dtype))
    return Divergence(first - prompt_length, float(best[0] - best[1]), near)
