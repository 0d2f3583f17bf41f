"""What a drafter borrows of its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TargetWeights:
    """What a drafter borrows of its target, so that no checkpoint has to store it.

    Attributes:
        embed: maps token ids `[...]` to the target's input embeddings `[..., D]`.
        head: `[V', D]`, the target's output rows of the draft vocabulary; `None` if the drafter trained its own, or if
            they were left out.
        vocab_ids: `[V']`, int64, the token id of each row.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: torch.Tensor | None
    vocab_ids: torch.Tensor
