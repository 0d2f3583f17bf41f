"""Training of SpecFormer drafters ("SpecFormer", section 3): all slots of a chain are compared at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...drafters.base.target_weights import TargetWeights
from ...training.families.hidden_state import TravellingFamily
from ...training.families.trainable import TRAINABLE
from ...training.loop.arguments import DRAFTER_OPTIONS
from ...training.loss.predictions import StatePredictions
from .collapsed_frames import CollapsedFrames
from .configuration_specformer import SpecFormerConfig
from .modeling_specformer import SpecFormerDrafter


@dataclass(frozen=True)
class FramePredictions(StatePredictions):
    """Predictions of slots that are frames: what they say after a path, collapsed, whichever frame says it.

    So every depth depends on all slots of its chain. The state of a path holds them and the state of the collapse.
    """

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*super().parameters, self.drafter.blank]

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        slots, state, result = torch.stack(list(hidden_states), dim=1), None, list[torch.Tensor | None]()
        frames = self._collapsed(slots)
        for depth in range(tokens.shape[1]):
            state = frames.advance(depth + 1, tokens[:, depth : depth + 1], state)
            result.append(torch.cat([slots.flatten(1), state[:, 0].to(slots.device)], dim=-1))
        return result

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert states is not None
        count, width = self.drafter.config.num_draft_steps, self.drafter.config.hidden_size
        slots, state = states[:, : count * width], states[:, count * width :]
        slots = slots.to(hidden.dtype).unflatten(-1, (count, -1))
        return self._collapsed(slots).children(state[:, None].float())[:, 0]

    def _collapsed(self, slots: torch.Tensor) -> CollapsedFrames:
        return CollapsedFrames(self.drafter.frames(slots, self.weights), self.weights.vocab_ids, slots.shape[1])


class SpecFormerFamily(TravellingFamily):
    name = "specformer"
    drafter = SpecFormerDrafter
    least = {"draft_vocab_size": 1, "intermediate_size": 1, "num_draft_steps": 1, "tree_size": 1}  # noqa: RUF012
    arguments = {"rolled_fraction": 1.0}  # noqa: RUF012  # further slots are quick to compute

    def by_columns(self, config: SpecFormerConfig) -> bool:
        return not config.ctc

    def predictions(self, drafter: SpecFormerDrafter, weights: TargetWeights) -> StatePredictions:
        return (FramePredictions if drafter.config.ctc else StatePredictions)(drafter, weights)

    def describe(self, drafter: SpecFormerDrafter) -> str:
        config = drafter.config
        reads = "with" if config.reads_tokens else "without"
        return f"{config.num_draft_steps} {'frames' if config.ctc else 'slots'}, {reads} the last token"


TRAINABLE[SpecFormerFamily.name] = SpecFormerFamily()
DRAFTER_OPTIONS["reads_tokens"] = bool
