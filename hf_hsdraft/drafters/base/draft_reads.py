"""What a draft reads of a drafter's weights: by this it can be calculated how long a draft takes on a device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Read:
    """A part of a drafter that a draft multiplies by.

    Attributes:
        part: name of the part.
        weights: number of its weights.
        times: how often a draft reads them.
        rows: number of rows that are multiplied each time.
        borrowed: whether the weights are the target's own, and take no memory of their own.
    """

    part: str
    weights: int
    times: int
    rows: int
    borrowed: bool = False


def weights_of(*modules: nn.Module | None) -> int:
    """Returns the number of weights of some modules."""
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())
