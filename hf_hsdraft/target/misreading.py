"""Whether logits are those of the same text, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.tuning import TUNING


def same_but_rounding(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether rounding explains how logits `[..., V]` differ; another token, mask or position is far beyond it."""
    distances = _distances(logits, expected)
    if logits.dtype in (torch.float32, torch.float64):
        highest = torch.get_float32_matmul_precision() == "highest"
        return float(distances.max()) <= (TUNING.same_float32 if highest else TUNING.same_reduced)
    # In half precision a close call of an expert router may change one position.
    return float(distances.median()) <= TUNING.same_half


def heeded(
    logits: torch.Tensor, expected: torch.Tensor, misread: Sequence[torch.Tensor], all_faults: bool
) -> bool | None:
    """Whether logits are nearer to what is expected than to what a faulty target would return, where that differs.

    Args:
        logits: `[..., V]`, of half precision.
        misread: what targets of one fault each return.
        all_faults: every fault has to make a difference; otherwise the first one alone.

    Returns:
        `None` if what has to make a difference makes none here that rounding could not make.
    """
    shown = []
    own = _distances(logits, expected)
    for fault in misread:
        other = _distances(fault, expected)
        nearer = own <= TUNING.nearer * other
        if bool((~nearer & (other > TUNING.clear * TUNING.same_half)).any()):
            return False
        shown.append(bool((nearer & (other > TUNING.same_half)).any()))
    return True if all(shown if all_faults else shown[:1]) else None


def _distances(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of each row of logits, relative to the spread of the expected ones; infinite if not comparable."""
    floor = torch.finfo(logits.dtype).min / 2  # some models mask tokens by the least number there is, or less
    logits, expected = logits.float(), expected.float()
    ruled_out = [~(x > floor) for x in (logits, expected)]
    count = (~ruled_out[1]).sum(dim=-1, keepdim=True).clamp(min=1)
    kept = expected.masked_fill(ruled_out[1], 0.0)
    spread = (kept - kept.sum(dim=-1, keepdim=True) / count).masked_fill(ruled_out[1], 0.0).norm(dim=-1)
    distance = (logits.masked_fill(ruled_out[0], 0.0) - kept).norm(dim=-1) / spread.clamp(min=1e-12)
    same = (ruled_out[0] == ruled_out[1]).all(dim=-1) & distance.isfinite()
    return distance.masked_fill(~same, float("inf")).flatten()
