"""Training of small language models as drafters: distillation on the target's own answers (DistillSpec, section 4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...core.checks import demand, public_name
from ...drafters.base.draft_options import leave_folder
from ...drafters.base.plain_config import AnyTarget
from ...drafters.base.target_weights import DrafterOutput, TargetWeights
from ...drafters.base.travelling_config import any_special_tokens
from ...runtime.misreading import same_but_rounding
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.tree_reading import as_attention_takes_it
from ...training.families.family import OPTIONS, Choose, TrainableFamily, name_of, trained
from ...training.families.trainable import TRAINABLE
from ..language_model.lm_drafter import CausalLMDrafter
from ..language_model.lm_texts import ability_of
from .branches import Branches
from .layer_subset import evenly, layers_of, with_layers

_PRUNED_BY = 5  # a fresh drafter has a fifth of the target's layers


@dataclass(frozen=True, kw_only=True)
class LMTrainingConfig(AnyTarget):
    """What training asks of a drafter's configuration. It is not saved: the folder holds the language model's.

    `vocab_size` and `draft_vocab_size` are the number of tokens that the model and its target share, `num_draft_steps`
    is K, and `target_name` is for the card.
    """

    vocab_size: int = 0
    draft_vocab_size: int = 0
    num_draft_steps: int = 5
    target_name: str = ""
    hidden_size: int = 0

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        return any_special_tokens(AnyTarget())


class TrainedLM(CausalLMDrafter):
    """A small language model with the forward of training. It drafts, and is saved, as `CausalLMDrafter`.

    Its predictions follow the true tokens, so depth d of the chain at position i is the model's output at position
    i+1+d. Chains that leave the text are read as branches of it; with `apart`, also those that equal the text.
    """

    loss_function: Any = None
    apart = False

    def borrow(self, embedding: nn.Embedding, output_head: nn.Module | None = None) -> TargetWeights:
        """Returns what the losses need to know of the drafter's tokens. Nothing of the target is used."""
        table = self.model.get_input_embeddings()
        size = min(len(table.weight), text_config(self.model).vocab_size, len(embedding.weight))
        ids = torch.arange(size, device=self.device)
        return TargetWeights(lambda tokens: table(tokens.to(self.device)), None, ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits `[..., V]` of final states `[..., D]`."""
        return self.model.get_output_embeddings()(hidden)

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor,
        document_ids: torch.Tensor,
        path_embeds: torch.Tensor,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Reads the texts of a pack, and the chains that leave them.

        Args:
            taps: `[T, taps * D]`, the target's hidden states.
            embeds: `[T, D]`, the model's embeddings of the next tokens x_{i+1}; for the last one, of the first token.
            position_ids: `[T]`, int64, position of each token in its text.
            starts: `[S]`, int64, position i of each chain.
            document_ids: `[T]`, int64, the text of each token.
            path_embeds: `[S, K, D]`, embeddings of the parents x_{i+1}, x_{i+2}, ... of each depth.
            num_rolled: number R of chains, the first ones, that go beyond the first depth; `None` for all.
            labels: passed to `loss_function`; `None` for no loss.
        """
        text, rolled, depths = embeds.roll(1, dims=0), starts[:num_rolled], path_embeds.shape[1]
        later = torch.arange(1, depths, device=starts.device)
        places = (rolled[:, None] + 1 + later).clamp(max=len(text) - 1)
        further = path_embeds[: len(rolled), 1:]
        leaves = self.apart or not torch.equal(text[places], further)
        count = depths - 1 if leaves else 0
        rows = Branches.of(position_ids, document_ids, rolled, count)
        inputs = torch.cat([text, further.flatten(0, 1).to(text.dtype)]) if leaves else text
        if leaves:
            places = len(text) + torch.arange(len(rolled) * count, device=starts.device).view(len(rolled), count)
        states = self.states(inputs, rows, self.before(taps, document_ids, rolled, rows))
        hidden_states = states[starts + 1], *(states[place] for place in places.unbind(dim=1))
        loss = None if labels is None else self.loss_function(self, hidden_states, labels)
        return DrafterOutput(loss=loss, hidden_states=hidden_states)

    def before(
        self, taps: torch.Tensor, document_ids: torch.Tensor, starts: torch.Tensor, rows: Branches
    ) -> torch.Tensor | None:
        """Returns what is known of the target where each row is read; here nothing."""
        return None

    def states(self, inputs: torch.Tensor, rows: Branches, known: torch.Tensor | None) -> torch.Tensor:
        """Returns the final states `[N, D]` of rows with embeddings `inputs` `[N, D]`; `known` is from `before`."""
        masks, positions = {}, rows.positions[None]
        attention = text_config(self.model)._attn_implementation
        for kind in ability_of(self.model).kinds:
            near = kind.sees(positions, positions, positions.new_zeros(1))
            seen = rows.seen[None] if near is None else rows.seen[None] & near
            masks[kind.name] = as_attention_takes_it(seen, attention, inputs.dtype)
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = self.model.base_model(
            inputs_embeds=inputs[None], attention_mask=mask, position_ids=positions, use_cache=False
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps tied weights once: files hold no tensor twice."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name in self._second_names():
            found.pop(prefix + name, None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Accepts tied weights that are there once."""
        twins = {name: state_dict[first] for name, first in self._second_names().items() if first in state_dict}
        return super().load_state_dict({**twins, **state_dict}, *args, **kwargs)

    def _second_names(self) -> dict[str, str]:
        """Maps the further names of tied weights to their first names."""
        names = {id(weight): name for name, weight in self.named_parameters()}
        every = self.named_parameters(remove_duplicate=False)
        return {name: names[id(weight)] for name, weight in every if names[id(weight)] != name}


class LMFamily(TrainableFamily):
    """Small language models with the target's tokenizer, as `hsdraft make prune` makes them."""

    name = "lm"
    drafter: Any = TrainedLM
    drafts_as: Any = CausalLMDrafter  # class of its drafters outside training
    reads_tokens = True  # the states have read the tokens of their path
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
        tokens = {"vocab_size": config.vocab_size, "draft_vocab_size": config.vocab_size}
        return LMTrainingConfig(**tokens, num_draft_steps=steps, hidden_size=config.hidden_size)

    def untrained(self, target: Any, fields: Mapping[str, Any]) -> TrainedLM:
        return self.made(with_layers(target, self._kept(target, fields)), target, fields)

    def _steps(self, fields: Mapping[str, Any], default: int) -> int:
        steps: int = fields.get("num_draft_steps", default)
        most = CausalLMDrafter.num_draft_steps
        wanted = f"expected 1 to {most}, as a language model drafts no deeper"
        demand(1 <= steps <= most, "num_draft_steps", steps, wanted)
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
        wanted = f"the drafter to start from has {found}; leave it out, or make one by `hsdraft make prune`"
        layers = fields.get("num_hidden_layers", found)
        demand(layers == found, "num_hidden_layers", layers, wanted)
        self._ready(drafter, fields)

    def _ready(self, drafter: Any, fields: Mapping[str, Any]) -> Any:
        """Sets the fields that no weights depend on, and checks that the drafter can be trained."""
        config, options = text_config(drafter.model), drafter.generation_config
        _check_trainable(drafter)
        size = min(config.vocab_size, len(drafter.model.get_input_embeddings().weight))
        steps = self._steps(fields, max(self.steps, options.num_assistant_tokens))
        name = public_name(fields.get("target_name", ""))
        tokens = {"vocab_size": size, "draft_vocab_size": size}
        drafter.config = LMTrainingConfig(
            **tokens, num_draft_steps=steps, target_name=name, hidden_size=config.hidden_size
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

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.model.model.get_output_embeddings())

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"path_embeds": self.weights.embed(tokens)}

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.model.logits(hidden)[..., : len(self.weights.vocab_ids)]

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


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


TRAINABLE[LMFamily.name] = LMFamily()
