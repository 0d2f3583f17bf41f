"""Refinement of drafts whose depths know little of one another ("Exploring and Improving Drafts in Blockwise Parallel
Decoding", local rescoring by a neural language model).

Such a drafter predicts each depth independently, so a path may be incoherent. A tiny model of the target's text reads
the path. With q the drafter's distribution for a child and p the model's, the child is drafted from

    q'(v) ~ q(v)^(1 - share) p(v)^share,    or in logits    (1 - share) * drafter + share * model.

Only drafts change. The verifier knows q', like any other distribution that nodes are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.tensors import Transform, on_device
from ...drafters.base import refiners
from ...drafters.base.target_weights import TargetWeights
from .path_lm import PathLM, has_refiner, refiner_of

# The target's hidden states already tell the drafters the text and the root before the first depth. Leftover states,
# which `reuse="resample"` draws from again, are older than the root; their first depth is not refined either.
_FIRST_LEVEL = 2


@dataclass(frozen=True)
class Refinement(refiners.Refinement):
    """The refinement of one draft. Letters in the shapes: as in `TokenBias`; S is the size of the model's states."""

    model: PathLM
    share: float  # weight of the model in the logits, in [0, 1)
    embed: Transform
    since: torch.Tensor  # `[B, 1, S]`, the model's states before the roots

    @property
    def state_size(self) -> int:
        return self.since.shape[-1]

    def advance(self, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.model.advance(self.embed(tokens), self.since if states is None else states.to(self.since.dtype))

    def __call__(self, level: int, logits: torch.Tensor, states: torch.Tensor, up: Transform) -> torch.Tensor:
        if level < _FIRST_LEVEL:
            return logits
        return (1.0 - self.share) * logits + self.share * up(self.model.code(states))

    def among(self, columns: torch.Tensor | None) -> Transform:
        if columns is None:
            return self.model.up
        rows, bias = self.model.up.weight[columns].mT, self.model.up.bias[columns][:, None]
        return lambda code: code @ rows + bias


class Refiner(refiners.Refiner):
    """Refines the drafts of a call; remembers the last tokens of the texts."""

    def __init__(self, model: PathLM, share: float, weights: TargetWeights, rows: int) -> None:
        self.model, self._share, self._weights = model, share, weights
        self._last: list[list[int]] = [[] for _ in range(rows)]

    @classmethod
    def check(cls, drafter: Any, share: float) -> None:
        if not has_refiner(drafter):
            raise ValueError(
                f"refinement={share!r} is invalid: this drafter has no refiner beside its weights; train one by "
                "`hsdraft make refiner` and load the drafter again, or set refinement to 0"
            )

    @classmethod
    def of(cls, drafter: Any, share: float, weights: TargetWeights, rows: int) -> Refiner:
        return cls(refiner_of(drafter, weights), share, weights, rows)

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        self._last[row] = [*self._last[row], *tokens][-self.model.sizes.length - 1 :]

    def refinement(self, rows: Sequence[int]) -> Refinement:
        length, device = self.model.sizes.length, self._weights.vocab_ids.device
        before = [self._last[row][:-1] for row in rows]
        padded = [[0] * (length - len(tokens)) + tokens for tokens in before]
        known = [[False] * (length - len(tokens)) + [True] * len(tokens) for tokens in before]
        embeds = self._weights.embed(on_device(padded, device))
        since = self.model.after(embeds, on_device(known, device, torch.bool))
        return Refinement(self.model, self._share, self._weights.embed, since[:, None])


refiners.REFINERS["refinement"] = Refiner
