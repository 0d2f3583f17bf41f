"""What the forward of a drafter's network returns, in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class DrafterOutput(ModelOutput):
    """Output of the forward of a drafter.

    Attributes:
        loss: what the drafter's `loss_function` made of the labels, if there were any.
        hidden_states: K tensors, `[S, D]` and then `[num_rolled, D]`: drafted states along each chain. That of depth d
            predicts the token at start + 2 + d.
        context: where the drafter reads on from, the keys and values with the new positions appended.
    """

    loss: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    context: Any = None
