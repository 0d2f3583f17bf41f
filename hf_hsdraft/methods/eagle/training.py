"""Training of EAGLE-3 drafters by a training-time test ("EAGLE-3", section 3.2), or of all depths at once (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...training.families.trainable import TRAINABLE
from ..published.training import PublishedFamily
from .configuration import EagleConfig
from .drafter import EagleDrafter, check_can_be_written


class EagleFamily(PublishedFamily):
    """Drafters that roll the target's hidden states forward, a token at a time, or all depths at once."""

    name = "eagle3"
    drafter = EagleDrafter
    config = EagleConfig
    least = {"draft_vocab_size": 1}  # noqa: RUF012
    free = ("target_name", "num_draft_steps")

    def derived(self, target: Any, fields: Mapping[str, Any]) -> EagleConfig:
        windows = (None,) * fields.get("num_hidden_layers", 1)
        config: EagleConfig = super().derived(target, {"windows": windows, **fields})
        self.check_trainable(config)
        return config

    def check_trainable(self, config: EagleConfig) -> None:
        check_can_be_written(config)
        _ = config.window  # raises where layers differ

    def column_cost(self, drafter: EagleDrafter, target: Any) -> float:
        reads = drafter.num_draft_steps if drafter.config.mask_token_id is None else 1
        return reads * super().column_cost(drafter, target)

    def by_columns(self, config: EagleConfig) -> bool:
        return True

    def describe(self, drafter: EagleDrafter) -> str:
        config = drafter.config
        parallel = "" if config.mask_token_id is None else ", all depths at once"
        return f"{config.num_hidden_layers} layers{parallel}"

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        return self.model.config.mask_token_id is None

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        if self.reads_tokens:
            return {"path_embeds": self.weights.embed(tokens), "num_draft_steps": tokens.shape[1]}
        mask = torch.tensor(self.model.config.mask_token_id, device=tokens.device)
        shape = len(tokens), self.model.num_draft_steps, -1
        return {"path_embeds": self.weights.embed(mask).expand(shape)}


TRAINABLE[EagleFamily.name] = EagleFamily()
