"""Training of self-speculative drafters: an imitation network learns the output of the target's other layers (FastVLM).

The loss combines the cosine distance from the target's final hidden states, the divergence from the target's
distribution, and cross-entropy with the target's first choice. Only the imitation network is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...drafters.base.target_weights import TargetWeights
from ...training.families.family import Choose
from ...training.families.trainable import TRAINABLE
from ...training.families.travelling import TravellingFamily
from ...training.loop.arguments import DRAFTER_OPTIONS
from ...training.loss.predictions import Predictions, head_logits, trained
from .modeling_self import SelfDrafter


@dataclass(frozen=True)
class ImitationPredictions(Predictions):
    """Predictions of imitations, whose first layers have read the tokens of the text."""

    drafter: SelfDrafter
    weights: TargetWeights
    by_columns = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.drafter.norm, self.drafter.lm_head)

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        return head_logits(self.drafter, hidden, self.weights, columns)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.norm(hidden)


class SelfFamily(TravellingFamily):
    name = "self"
    drafter = SelfDrafter
    least = {"draft_vocab_size": 1, "intermediate_size": 1, "num_draft_steps": 1, "tree_size": 1}  # noqa: RUF012
    # Along the text all depths predict alike. So nearly all chains need only the first, and the few predictions of
    # deeper depths must not weigh as much as all of the first.
    arguments = {  # noqa: RUF012
        "objective": "kl_ce", "cosine_weight": 1.0, "rolled_fraction": 0.05, "chains_per_conversation": 512,
        "depth_weighting": "by-prediction",
    }  # fmt: skip
    follows_drafts = False

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> SelfDrafter:
        drafter: SelfDrafter = self.with_chosen_vocabulary(target, fields, choose)
        return drafter

    def taps(self, drafter: SelfDrafter, target: Any) -> Sequence[int]:
        return tuple(drafter.config.target_tap_layers)

    def predictions(self, drafter: SelfDrafter, weights: TargetWeights) -> ImitationPredictions:
        return ImitationPredictions(drafter, weights)

    def describe(self, drafter: SelfDrafter) -> str:
        config = drafter.config
        return f"the target's first {config.draft_layers} of {config.target_num_hidden_layers} layers"


TRAINABLE[SelfFamily.name] = SelfFamily()
DRAFTER_OPTIONS["draft_layers"] = int
