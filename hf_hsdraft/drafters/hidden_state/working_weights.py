"""A drafter's weights as decoding multiplies by them: its own modules, and the head that it borrows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ...core.tensors import Transform, side_by_side
from .injectors import Injector
from .network import HSDraftNetwork
from .trunk import Trunk


@dataclass(frozen=True)
class WorkingWeights(Trunk):
    """All of a drafter that decoding multiplies by.

    Attributes:
        norm, head: from drafted states to draft logits.
        injector: token information.
    """

    norm: Transform
    head: Transform
    injector: Injector

    @classmethod
    def of(cls, drafter: HSDraftNetwork, head: torch.Tensor | None) -> WorkingWeights:
        """Returns the weights of a drafter as its modules have them.

        Args:
            drafter: the drafter.
            head: `TargetWeights.head`.
        """
        trunk = drafter.trunk(of_layer=lambda layer: layer.products(side_by_side))
        return cls(
            **vars(trunk),
            norm=drafter.norm,
            head=partial(F.linear, weight=head) if drafter.lm_head is None else drafter.lm_head,  # type: ignore[arg-type]
            injector=drafter.injector,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., V']` of drafted states `[..., D]`, before any token information."""
        return self.head(self.norm(hidden))
