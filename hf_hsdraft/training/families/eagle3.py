"""Training of EAGLE-3 drafters ("EAGLE-3", section 3.2, training-time test), and of parallel ones (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...drafters.eagle.configuration import EagleConfig
from ...drafters.eagle.drafter import EagleDrafter
from ..loss.predictions import StatePredictions
from .family import Choose
from .published import PublishedFamily


class EaglePredictions(StatePredictions):
    """Predictions of states that have read the tokens of their path."""

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        return self.drafter.config.mask_token_id is None

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        if self.reads_tokens:
            return {"path_embeds": self.weights.embed(tokens), "num_draft_steps": tokens.shape[1]}
        mask = torch.tensor(self.drafter.config.mask_token_id, device=tokens.device)
        shape = len(tokens), self.drafter.num_draft_steps, -1
        return {"path_embeds": self.weights.embed(mask).expand(shape)}


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
        drafter: EagleDrafter = self.with_chosen_vocabulary(target, fields, choose)
        self.set_options(drafter, fields)
        return drafter

    def check_trainable(self, config: EagleConfig) -> None:
        _ = config.window  # raises where layers differ

    def by_columns(self, config: EagleConfig) -> bool:
        return True

    def width(self, config: EagleConfig) -> int:
        return config.sizes.hidden_size

    def describe(self, drafter: EagleDrafter) -> str:
        config = drafter.config
        parallel = "" if config.mask_token_id is None else ", all depths at once"
        return f"{config.num_hidden_layers} layers{parallel}"
