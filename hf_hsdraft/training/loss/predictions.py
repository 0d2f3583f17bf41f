"""What a drafter predicts, as losses see it, however its head is made.

Letters in the shapes: S chains, K draft steps, D size of a drafted state, V' draft vocabulary, N predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns logits `[N, V']` of drafted states `[N, D]`, with `states` `[N, ...]` of their paths if there are.

        `columns` `[C]`, int64, are those of the draft vocabulary to compute, `[N, C]`; `None` for all. Only families
        that say so (`TrainableFamily.by_columns`) are asked for some.
        """
        raise NotImplementedError

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what is compared with the target's final hidden states: `[N, width]`, of drafted states `[N, D]`."""
        return hidden


@dataclass(frozen=True)
class StatePredictions(Predictions):
    """Predictions of a `StateNetwork`'s drafted states; those of most know nothing of the tokens between them."""

    drafter: Any
    weights: TargetWeights

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.drafter.norm, self.drafter.lm_head)

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        return head_logits(self.drafter, hidden, self.weights, columns)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.norm(hidden)


def head_logits(
    drafter: Any, hidden: torch.Tensor, weights: TargetWeights, columns: torch.Tensor | None
) -> torch.Tensor:
    """`StateNetwork.logits` of a drafter with its `norm` and `lm_head`: of some columns `[C]`, int64, or of all."""
    if columns is None:
        return drafter.logits(hidden, weights)
    normed = drafter.norm(hidden)
    if drafter.lm_head is not None:
        return some_columns(drafter.lm_head, normed, columns)
    assert weights.head is not None
    return F.linear(normed, weights.head[columns])


def some_columns(module: nn.Module, inputs: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Returns what a linear module gives, `[..., V']`, or some columns of it. What wraps it computes all of them."""
    if columns is None or type(module) is not nn.Linear:
        return module(inputs) if columns is None else module(inputs)[..., columns]
    return F.linear(inputs, module.weight[columns], None if module.bias is None else module.bias[columns])


def trained(*modules: nn.Module | None) -> list[nn.Parameter]:
    """Returns the trained parameters of modules; `None` stands for a missing module."""
    known = [module for module in modules if module is not None]
    return [parameter for module in known for parameter in module.parameters() if parameter.requires_grad]
