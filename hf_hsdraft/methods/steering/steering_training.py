"""Training of the steering of a small language model ("Steering Pretrained Drafters", SD^2, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from ...core.checks import demand
from ...training.families.trainable import TRAINABLE
from ..distillation.branches import Branches
from ..distillation.lm_training import LMFamily, TrainedLM
from ..language_model.lm_drafter import CausalLMDrafter
from ..published.checkpoint import AnyCheckpoint
from .steered_lm import SteeredLMDrafter, Steering, SteeringSizes, has_steering


class TrainedSteeredLM(TrainedLM, SteeredLMDrafter):
    """A steered language model with the forward of training.

    A token of the text at position j is read with the vector of position j - 1, like accepted tokens. The token at
    depth d of the chain at position i is read with the vector of position i, which is d + 1 positions old, as in a
    draft.
    """

    apart = True

    def before(
        self, taps: torch.Tensor, document_ids: torch.Tensor, starts: torch.Tensor, rows: Branches
    ) -> torch.Tensor:
        """Returns `[N, F]`, what the target's hidden states add where each row is read; zeros at a text's first."""
        every = torch.arange(len(taps), device=taps.device)
        follows = (document_ids == document_ids.roll(1)) & (every > 0)
        own = torch.where(follows, every, 0)
        sources = torch.where(rows.chain < 0, pad(own, (0, len(rows.chain) - len(own))), starts[rows.chain] + 1)
        deltas = pad(self.steering.deltas(self.steering.vectors(taps)), (0, 0, 1, 0))  # row 0 is zeros
        return deltas[sources]

    def states(self, inputs: torch.Tensor, rows: Branches, known: torch.Tensor | None) -> torch.Tensor:
        assert known is not None
        with self.steering.applied(known[None]):
            return super().states(inputs, rows, known)


class SteeredLMFamily(LMFamily):
    """Small language models steered by the target's hidden states. The language model itself is frozen."""

    name = "steered-lm"
    drafter = TrainedSteeredLM
    drafts_as = SteeredLMDrafter
    arguments = {"rolled_fraction": 1.0, "chains_per_conversation": 24}  # noqa: RUF012
    starts_afresh = False  # the language model is frozen, so an untrained one is useless
    steps = 8  # vectors of 1 to 8 positions before, as in the paper

    @property
    def fields(self) -> set[str]:
        return super().fields | {"target_tap_layers"}

    def made(self, model: Any, target: Any, fields: Mapping[str, Any]) -> TrainedSteeredLM:
        steering = Steering(SteeringSizes.of(model, target, fields.get("target_tap_layers")))
        drafter = self._frozen(TrainedSteeredLM(model, steering=steering))
        drafter.generation_config.num_assistant_tokens = self._steps(fields, self.steps)  # drafts as deep as trained
        return drafter

    def loaded(self, name: str, target: Any, fields: Mapping[str, Any]) -> TrainedSteeredLM:
        """Returns the drafter to start from: a steered one, or a language model with a new steering."""
        if has_steering(AnyCheckpoint.open(name)):
            steered: Any = self.drafter.from_pretrained(name, dtype=torch.float32)
            return self._frozen(steered)
        plain = CausalLMDrafter.from_pretrained(name, dtype=torch.float32)
        drafter = self.made(plain.model, target, fields)
        drafter.tokenizer = plain.tokenizer
        for option, value in vars(plain.generation_config).items():
            setattr(drafter.generation_config, option, value)
        options = drafter.generation_config  # drafts at least as deep as trained
        options.num_assistant_tokens = self._steps(fields, max(self.steps, options.num_assistant_tokens))
        return drafter

    def continued(self, drafter: TrainedSteeredLM, fields: Mapping[str, Any]) -> None:
        found = list(drafter.taps)
        wanted = f"the drafter to start from reads {found}; leave it out, or start from the language model alone"
        taps = fields.get("target_tap_layers", found)
        demand(taps == found, "target_tap_layers", taps, wanted)
        super().continued(drafter, fields)

    def _frozen(self, drafter: TrainedSteeredLM) -> TrainedSteeredLM:
        drafter.model.requires_grad_(False)
        drafter.steering.requires_grad_(True)
        return drafter

    def _of_same_model(self, kind: Any, drafter: Any) -> Any:
        made = super()._of_same_model(kind, drafter)
        made.steer_by(drafter.steering)
        return made

    def layers(self, drafter: TrainedSteeredLM) -> list[nn.Module]:
        return []  # recomputed in the backward, they would not be steered

    def describe(self, drafter: TrainedSteeredLM) -> str:
        size = sum(weight.numel() for weight in drafter.steering.parameters())
        return f"{super().describe(drafter)}, as it was, with a steering of {size / 1e6:.1f}M parameters"


TRAINABLE[SteeredLMFamily.name] = SteeredLMFamily()
