"""Training of hidden-state drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...drafters.base.refiners import NOT_REFINED
from ...drafters.base.target_weights import TargetWeights
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...hub.model_card import trunk_in_words
from ..loss.predictions import Predictions, trained
from ..loss.timid import start_timidly
from .identity import record_target
from .travelling import TravellingFamily


@dataclass(frozen=True)
class InjectedPredictions(Predictions):
    """Predictions of states that are drafted without tokens; an injector adds the tokens of a path.

    The first depth needs none: its states have read the parent.
    """

    drafter: HSDrafter
    weights: TargetWeights

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.drafter.norm, self.drafter.injector, self.drafter.lm_head)

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        embeds, advance = self.weights.embed(tokens), self.drafter.injector.advance
        states = advance(embeds[:, 0], None)
        result: list[torch.Tensor | None] = [None]
        for depth, hidden in enumerate(hidden_states[1:], 1):
            rows = hidden.shape[0]
            states = advance(embeds[:rows, depth], states[:rows])
            result.append(states)
        return result

    def logits(self, hidden: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        logits = self.drafter.logits(hidden, self.weights)
        return logits if states is None else self.drafter.injector.told(logits, hidden, states)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.norm(hidden)


class HiddenStateFamily(TravellingFamily):
    """Drafters that roll hidden states forward without tokens."""

    name = "hidden-state"
    drafter = HSDrafter
    least = {"draft_vocab_size": 1, "intermediate_size": 1, "injector_rank": 1, "injector_hidden_size": 1}  # noqa: RUF012
    plain_options = {"reuse": "none", **NOT_REFINED}  # noqa: RUF012
    takes_adapters = True

    def continued(self, drafter: HSDrafter, fields: Mapping[str, Any]) -> None:
        drafter.config.target_reference = None  # it is recorded again at the end
        super().continued(drafter, fields)

    def layers(self, drafter: HSDrafter) -> list[nn.Module]:
        return [*drafter.layers, *(layer for step in drafter.step_modules for layer in step.layers)]  # type: ignore

    def start_from_target(self, drafter: HSDrafter, target: Any, finals: torch.Tensor) -> None:
        if drafter.config.hidden_size == drafter.config.target_hidden_size:
            rows = target.get_output_embeddings().weight.detach()
            rows = rows[drafter.draft_vocab_ids().to(rows.device)]
            start_timidly(drafter.norm.weight, rows, finals, up=drafter.injector.up.weight, head=drafter.lm_head)

    def predictions(self, drafter: HSDrafter, weights: TargetWeights) -> InjectedPredictions:
        return InjectedPredictions(drafter, weights)

    def record_target(self, drafter: HSDrafter, target: Any, tokenizer: Any, name: str | None = None) -> None:
        record_target(drafter, target, tokenizer, name)

    def describe(self, drafter: HSDrafter) -> str:
        config = drafter.config
        return f"{trunk_in_words(config.to_dict())}, {config.injector} injector"
