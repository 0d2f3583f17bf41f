"""Calibration of the drafter: accuracy of its first choice by its confidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..loss.loss import LossParts

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Confidence and accuracy of predictions, as tables of K depths x `BINS` equal bins of confidence.

    `accuracy` is the share of a bin's predictions whose first choice is the target's. Empty bins hold 0.
    """

    count: list[list[int]]
    confidence: list[list[float]]
    accuracy: list[list[float]]

    @classmethod
    def of(cls, parts: Iterable[LossParts], steps: int) -> Calibration:
        """Collects the measured predictions of several batches, for `steps` depths."""
        count, confidence, right = (torch.zeros(steps * BINS) for _ in range(3))
        for part in parts:
            cell = part.depth.cpu() * BINS + (part.confidence.cpu() * BINS).long().clamp(max=BINS - 1)
            count += torch.bincount(cell, minlength=len(count))
            confidence.index_add_(0, cell, part.confidence.cpu().float())
            right.index_add_(0, cell, part.right.cpu().float())
        filled = count.clamp(min=1)

        def table(values: torch.Tensor) -> list[list[float]]:
            return values.view(steps, BINS).tolist()

        counts = [[int(value) for value in row] for row in table(count)]
        return cls(counts, table(confidence / filled), table(right / filled))
