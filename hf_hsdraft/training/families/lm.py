"""Training of small language models as drafters: distillation on the target's own answers (DistillSpec, section 4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...core.checks import public_name
from ...drafters.base.refiners import leave_folder
from ...drafters.language_model.layer_subset import evenly, layers_of, with_layers
from ...drafters.language_model.lm_ability import ability_of
from ...drafters.language_model.lm_drafter import CausalLMDrafter
from ...runtime.misreading import same_but_rounding
from ...runtime.target_limits import decoder_layers, text_config
from ..loss.branches import Branches
from .family import OPTIONS, Choose, TrainableFamily, name_of
from .trained_lm import LMPredictions, LMTrainingConfig, TrainedLM

_PRUNED_BY = 5  # a fresh drafter has a fifth of the target's layers


class LMFamily(TrainableFamily):
    """Small language models with the target's tokenizer, as `hsdraft make prune` makes them."""

    name = "lm"
    drafter: Any = TrainedLM
    drafts_as: Any = CausalLMDrafter  # class of its drafters outside training
    predictions = LMPredictions
    least = {"num_hidden_layers": 1}  # noqa: RUF012
    # All depths are the same function of a text, so chains are followed to their ends, and there are fewer of them.
    arguments = {"rolled_fraction": 1.0, "chains_per_conversation": 32, "learning_rate": 3e-4}  # noqa: RUF012
    steps = 5  # default K

    @property
    def fields(self) -> set[str]:
        return {"target_name", "num_draft_steps", "num_hidden_layers", *OPTIONS}

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> LMTrainingConfig:
        config, steps = text_config(target), self._steps(fields, self.steps)
        self._kept(target, fields)
        return LMTrainingConfig(
            config.vocab_size, draft_vocab_size=config.vocab_size, num_draft_steps=steps, hidden_size=config.hidden_size
        )

    def untrained(self, target: Any, fields: Mapping[str, Any]) -> TrainedLM:
        return self.made(with_layers(target, self._kept(target, fields)), target, fields)

    def _steps(self, fields: Mapping[str, Any], default: int) -> int:
        steps: int = fields.get("num_draft_steps", default)
        if not 1 <= steps <= CausalLMDrafter.num_draft_steps:
            raise ValueError(
                f"num_draft_steps={steps} is invalid: expected 1 to {CausalLMDrafter.num_draft_steps}, as a language "
                "model drafts no deeper"
            )
        return steps

    def _kept(self, target: Any, fields: Mapping[str, Any]) -> list[int]:
        """The target's layers that a fresh drafter consists of."""
        count = decoder_layers(text_config(target))
        wanted = fields.get("num_hidden_layers", max(count // _PRUNED_BY, min(count, 2)))
        return evenly(count, wanted, "num_hidden_layers")

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> Any:
        """Returns some layers of the target as a drafter, in float32 on the CPU."""
        model = copy.deepcopy(with_layers(target, self._kept(target, fields))).float().cpu()
        return self._ready(self.made(model.eval(), target, fields), fields)

    def made(self, model: Any, target: Any, fields: Mapping[str, Any]) -> TrainedLM:
        """Returns a drafter of a language model, whose trained weights are set to need gradients."""
        return TrainedLM(model.requires_grad_(True))

    def check_start(self, drafter: Any, target: Any, tokenizer: Any) -> None:
        """All tokens of the texts must also have rows in the drafter's embedding."""
        super().check_start(drafter, target, tokenizer)
        rows, most = len(drafter.model.get_input_embeddings().weight), max(tokenizer.get_vocab().values())
        if most >= rows:
            raise ValueError(
                f"the drafter to start from has embeddings of {rows:,} tokens, the target's tokenizer has ids up to "
                f"{most:,}: texts may hold tokens that it cannot read. Give it embeddings of {most + 1:,} tokens "
                "(resize_token_embeddings), or start from another language model"
            )

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        leave_folder(drafter)
        found = decoder_layers(text_config(drafter.model))
        if fields.get("num_hidden_layers", found) != found:
            raise ValueError(
                f"num_hidden_layers={fields['num_hidden_layers']} is invalid: the drafter to start from has {found}; "
                "leave it out, or make one by `hsdraft make prune`"
            )
        self._ready(drafter, fields)

    def _ready(self, drafter: Any, fields: Mapping[str, Any]) -> Any:
        """Sets the fields that no weights depend on, and checks that the drafter can be trained."""
        config, options = text_config(drafter.model), drafter.generation_config
        _check_trainable(drafter)
        size = min(config.vocab_size, len(drafter.model.get_input_embeddings().weight))
        steps = self._steps(fields, max(self.steps, options.num_assistant_tokens))
        name = public_name(fields.get("target_name", ""))
        drafter.config = LMTrainingConfig(
            size, draft_vocab_size=size, num_draft_steps=steps, target_name=name, hidden_size=config.hidden_size
        )
        drafter.num_draft_steps = steps
        if "num_draft_steps" in fields:
            options.num_assistant_tokens = steps
        self.set_options(drafter, fields)
        return drafter

    def snapshot(self, drafter: Any) -> Any:
        """Returns a drafter of the same language model: training wraps the drafter's forward, not the model's."""
        copied = self._of_same_model(type(drafter), drafter)
        copied.config, copied.num_draft_steps = drafter.config, drafter.num_draft_steps
        return copied

    def taken(self, drafter: Any) -> Any | None:
        if type(drafter) is not self.drafts_as:
            return super().taken(drafter)
        return self._ready(self._of_same_model(self.drafter, drafter), {})

    def _of_same_model(self, kind: Any, drafter: Any) -> Any:
        """Returns a drafter of class `kind` with the same language model and options."""
        made = kind(drafter.model, drafter.tokenizer)
        made.generation_config = drafter.generation_config
        return made

    def layers(self, drafter: Any) -> list[nn.Module]:
        return list(layers_of(drafter.model)[1])

    def start_from_target(self, drafter: Any, target: Any, finals: torch.Tensor) -> None:
        """A language model starts from its own weights."""

    def record_target(
        self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        drafter.config = replace(drafter.config, target_name=name_of(target, name))
        drafter.tokenizer = drafter.tokenizer or tokenizer

    def describe(self, drafter: Any) -> str:
        config = text_config(drafter.model)
        return (
            f"a language model ({config.model_type}) of {decoder_layers(config)} layers of width {config.hidden_size}"
        )


@torch.no_grad()
def _check_trainable(drafter: TrainedLM) -> None:
    """Raises a ValueError for a language model whose chains cannot be read as here, or whose head does more."""
    model = drafter.model
    what, found = type(model).__name__, ability_of(model)
    if not found.kinds:
        raise ValueError(f"{what} cannot be trained: {found.reason or 'it reads no masks of trees'}")
    ids = torch.arange(8, device=model.device) % text_config(model).vocab_size
    rows = Branches.of(torch.arange(8, device=model.device), torch.zeros_like(ids), ids[:0], 0)
    states = TrainedLM.states(drafter, model.get_input_embeddings()(ids), rows, None)
    plain = model(input_ids=ids[None], use_cache=False).logits[0]
    if not same_but_rounding(drafter.logits(states), plain):
        raise ValueError(
            f"{what} cannot be trained: its logits are more than its final states times its output layer (a scale, cap "
            "or bias)"
        )
