"""Training of EAGLE-3 drafters ("EAGLE-3", section 3.2, training-time test), and of parallel ones (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...drafters.base.target_weights import TargetWeights
from ...drafters.eagle.configuration import EagleConfig
from ...drafters.eagle.drafter import EagleDrafter
from ..loss.predictions import Predictions, head_logits, trained
from .family import Choose
from .published import PublishedFamily


@dataclass(frozen=True)
class EaglePredictions(Predictions):
    """Predictions of states that have read the tokens of their path."""

    drafter: EagleDrafter
    weights: TargetWeights
    by_columns = True

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        return self.drafter.config.mask_token_id is None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.drafter.norm, self.drafter.lm_head)

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        if self.reads_tokens:
            return {"path_embeds": self.weights.embed(tokens), "num_draft_steps": tokens.shape[1]}
        mask = torch.tensor(self.drafter.config.mask_token_id, device=tokens.device)
        shape = len(tokens), self.drafter.num_draft_steps, -1
        return {"path_embeds": self.weights.embed(mask).expand(shape)}

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        return head_logits(self.drafter, hidden, self.weights, columns)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.norm(hidden)


class EagleFamily(PublishedFamily):
    """Drafters that roll the target's hidden states forward, a token at a time."""

    name = "eagle3"
    drafter = EagleDrafter
    config = EagleConfig
    predictions = EaglePredictions
    least = {"draft_vocab_size": 1}  # noqa: RUF012
    free = ("target_name", "num_draft_steps")

    def derived(self, target: Any, fields: Mapping[str, Any]) -> EagleConfig:
        windows = (None,) * fields.get("num_hidden_layers", 1)
        config: EagleConfig = super().derived(target, {"windows": windows, **fields})
        self.check_trainable(config)
        return config

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> EagleDrafter:
        config = self.config_for(target, fields)
        if config.draft_vocab_ids is None and config.draft_vocab_size < config.vocab_size:
            config = self.config_for(target, {**fields, "draft_vocab_ids": choose(config.draft_vocab_size)})
        drafter = EagleDrafter(config)
        self.set_options(drafter, fields)
        return drafter

    def check_trainable(self, config: EagleConfig) -> None:
        _ = config.window  # raises where layers differ

    def width(self, config: EagleConfig) -> int:
        return config.layer.hidden_size

    def describe(self, drafter: EagleDrafter) -> str:
        config = drafter.config
        parallel = "" if config.mask_token_id is None else ", all depths at once"
        return f"{config.num_hidden_layers} layers{parallel}"
