"""Training of self-speculative drafters: an imitation network learns the output of the target's other layers (FastVLM).

The loss combines the cosine distance from the target's final hidden states, the divergence from the target's
distribution, and cross-entropy with the target's first choice. Only the imitation network is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...training.families.hidden_state import TravellingFamily
from ...training.families.trainable import TRAINABLE
from ...training.loop.arguments import DRAFTER_OPTIONS
from .drafter import SelfDrafter


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

    def column_cost(self, drafter: SelfDrafter, target: Any) -> float:
        return drafter.num_draft_steps * super().column_cost(drafter, target)

    def by_columns(self, config: Any) -> bool:
        return True

    def taps(self, drafter: SelfDrafter, target: Any) -> Sequence[int]:
        return tuple(drafter.config.target_tap_layers)

    def describe(self, drafter: SelfDrafter) -> str:
        config = drafter.config
        return f"the target's first {config.draft_layers} of {config.target_num_hidden_layers} layers"


TRAINABLE[SelfFamily.name] = SelfFamily()
DRAFTER_OPTIONS["draft_layers"] = int
