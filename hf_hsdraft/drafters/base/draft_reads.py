"""Which weights a draft reads, for estimating how long a draft takes on a device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Read:
    """Weights that a draft multiplies by.

    Attributes:
        part: name.
        weights: number of weights.
        times: reads per draft.
        rows: rows multiplied per read.
        borrowed: whether the weights are the target's and take no extra memory.
    """

    part: str
    weights: int
    times: int
    rows: int
    borrowed: bool = False


def weights_of(*modules: nn.Module | None) -> int:
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())
