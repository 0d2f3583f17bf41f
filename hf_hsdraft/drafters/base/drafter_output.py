"""Output of a drafter network's forward, in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class DrafterOutput(ModelOutput):
    """Output of a drafter's forward.

    Attributes:
        loss: result of the drafter's `loss_function`, if labels were given.
        hidden_states: K tensors of drafted states, `[S, D]` and then `[num_rolled, D]`. Depth d predicts the token at
            start + 2 + d.
        context: keys and values including the new positions, to continue from.
    """

    loss: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    context: Any = None
