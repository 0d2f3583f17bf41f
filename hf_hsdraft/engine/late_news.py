"""News of rounds without drafts: a drafter reads them before it drafts again, if it ever does."""

from __future__ import annotations

from typing import Any

import torch

from ..core.tensors import Transform, on_device
from ..drafters.base.protocol import Accepted


class LateNews(Accepted):
    """News of one row, whose tensors are made when they are read.

    Args:
        position: of the token that was read.
        states: hidden states `[B, 1, D']`, of which the row has `place`.
        pick: selects the drafter's hidden states `[1, taps * D]` out of `[1, D']`.
    """

    def __init__(self, row: int, token: int, position: int, states: torch.Tensor, place: int, pick: Transform) -> None:
        vars(self).update(row=row, tokens=[token], _read=(position, states, place, pick))

    def __getattr__(self, name: str) -> Any:
        if name not in ("taps", "positions", "following"):
            raise AttributeError(name)
        position, states, place, pick = self._read
        following = on_device(self.tokens, states.device)
        vars(self).update(taps=pick(states[place]), positions=torch.tensor([position]), following=following)
        return vars(self)[name]
