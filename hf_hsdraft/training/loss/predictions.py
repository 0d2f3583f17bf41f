"""What a drafter predicts, as losses see it, however its head is made.

Letters in the shapes: S chains, K draft steps, D size of a drafted state, V' draft vocabulary, N predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...drafters.base.target_weights import TargetWeights


class Predictions:
    """What drafted states predict after given tokens.

    Depth d of the chain at position i predicts x_{i+2+d}. Its parent, the last token that it may know, is x_{i+1+d}.

    Attributes:
        weights: what the drafter borrows of its target.
        reads_tokens: whether drafted states depend on the path's tokens. If they do, each further token of a path takes
            another forward.
    """

    weights: TargetWeights
    reads_tokens: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters that `states`, `logits` and `final` depend on."""
        raise NotImplementedError

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Returns further inputs of the drafter's forward, by the parents of the first k depths, `[S, k]`, int64."""
        return {}

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns for each depth a state of the paths `[rows, ...]`; `None` where logits do not depend on them.

        `tokens` `[S, k]` are the parents of the first k depths, `hidden_states` their drafted states `[rows, D]`, whose
        rows are the first chains.
        """
        return [None] * len(hidden_states)

    def logits(self, hidden: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns logits `[N, V']` of drafted states `[N, D]`, with `states` `[N, ...]` of their paths if there are."""
        raise NotImplementedError

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what is compared with the target's final hidden states: `[N, width]`, of drafted states `[N, D]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class StatePredictions(Predictions):
    """Predictions of a `StateNetwork`'s drafted states, which know nothing of the tokens between them."""

    drafter: Any
    weights: TargetWeights

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.drafter.norm, self.drafter.lm_head)

    def logits(self, hidden: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.drafter.logits(hidden, self.weights)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.norm(hidden)


def trained(*modules: nn.Module | None) -> list[nn.Parameter]:
    """Returns the trained parameters of modules; `None` stands for a missing module."""
    known = [module for module in modules if module is not None]
    return [parameter for module in known for parameter in module.parameters() if parameter.requires_grad]
