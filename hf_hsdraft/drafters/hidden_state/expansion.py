"""Token information for drafted states: probabilities of a node's children."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.tensors import Transform
from ...verify.foresight import Race
from ..base.parallel_expansion import ParallelExpansion, TokenBias
from ..base.refiners import Refinement
from ..base.target_weights import TargetWeights
from .injectors import Injector
from .network import WorkingWeights


@dataclass(frozen=True)
class InjectedTokens(TokenBias):
    """The bias that an injector computes from a path.

    Attributes:
        projected: `[B, depth, ...]`, `Injector.project` of the drafted states.
        since: `[B, 1, S]`, for leftover states (reuse form B) the injector's state before the root: they were drafted
            without the root's token, so it is injected at depth 1 too.
    """

    injector: Injector
    weights: TargetWeights
    projected: torch.Tensor
    since: torch.Tensor | None = None

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.injector.advance(self.weights.embed(tokens), self.since if level == 1 else states)

    def code(self, level: int, states: torch.Tensor) -> torch.Tensor | None:
        if level == 1 and self.since is None:
            return None
        return self.injector.code(self.projected[:, level - 1 : level], states)

    def up(self, code: torch.Tensor) -> torch.Tensor:
        return self.injector.up(code)

    def among(self, columns: torch.Tensor) -> Transform | None:
        of_outputs = getattr(self.injector.up, "of", None)
        return None if of_outputs is None or len(columns) > 1 else of_outputs(columns[0])


@dataclass(frozen=True)
class Expansion(ParallelExpansion):
    @classmethod
    def of(
        cls,
        working: WorkingWeights,
        weights: TargetWeights,
        hidden: torch.Tensor,
        logits: torch.Tensor | None = None,
        since: torch.Tensor | None = None,
        temperature: float = 1.0,
        race: Race | None = None,
        refinement: Refinement | None = None,
    ) -> Expansion:
        """Of drafted states `[B, depth, D]`; `logits` if they differ from the head's."""
        bias = InjectedTokens(working.injector, weights, working.injector.project(hidden), since)
        logits = working.logits(hidden) if logits is None else logits
        return cls(logits, bias, temperature, race, working.injector.reach(logits), refinement)
