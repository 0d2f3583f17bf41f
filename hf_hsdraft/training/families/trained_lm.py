"""A small language model with the forward of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...drafters.base.target_weights import DrafterOutput, TargetWeights
from ...drafters.base.travelling_config import any_special_tokens
from ...drafters.language_model.lm_ability import ability_of
from ...drafters.language_model.lm_drafter import CausalLMDrafter, CausalLMDrafterConfig
from ...runtime.target_limits import text_config
from ...runtime.tree_reading import as_attention_takes_it
from ..loss.branches import Branches
from ..loss.predictions import Predictions, trained


@dataclass(frozen=True)
class LMTrainingConfig(CausalLMDrafterConfig):
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
        return any_special_tokens(CausalLMDrafterConfig())


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


@dataclass(frozen=True)
class LMPredictions(Predictions):
    """Predictions of states that have read the tokens of their path."""

    drafter: TrainedLM
    weights: TargetWeights
    reads_tokens = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.drafter.model.get_output_embeddings())

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"path_embeds": self.weights.embed(tokens)}

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.drafter.logits(hidden)[..., : len(self.weights.vocab_ids)]
