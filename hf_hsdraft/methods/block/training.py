"""Training of block drafters: DSpark's, and DFlash's in either layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ...training.families.family import Choose, trained
from ...training.families.trainable import TRAINABLE
from ..published.training import PublishedFamily
from .configuration import BlockConfig
from .drafter import BlockDrafter

logger = logging.get_logger(__name__)


class BlockFamily(PublishedFamily):
    """Drafters of whole blocks in one forward, whose states leave the network normed.

    A head may give each slot the token before it. The parent of the first depth is the anchor's token, which the head
    gets too.
    """

    name = "block"
    drafter = BlockDrafter
    config = BlockConfig
    least = {"draft_vocab_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "markov_rank": 1}  # noqa: RUF012
    arguments = {"rolled_fraction": 1.0}  # noqa: RUF012  # a block is computed whole in any case

    def derived(self, target: Any, fields: Mapping[str, Any]) -> BlockConfig:
        known = dict(fields)
        ids = known.pop("draft_vocab_ids", None)
        if ids is not None:
            known["draft_vocab_size"] = len(ids)
        config: BlockConfig = super().derived(target, known)
        if config.confidence_head != "none":
            raise ValueError(
                f"confidence_head={config.confidence_head!r} is invalid in training, as no objective trains it: "
                "leave it out"
            )
        self.check_trainable(config)
        return config

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> BlockDrafter:
        config, ids = self.config_for(target, fields), fields.get("draft_vocab_ids")
        if ids is None and config.has_own_head:
            ids = choose()
            config = self.config_for(target, {**fields, "draft_vocab_ids": ids})
        drafter = BlockDrafter(config)
        drafter.reset_parameters()
        if ids is not None and config.has_own_head:
            drafter.take_head(target.get_output_embeddings(), ids)
        self.set_options(drafter, fields)
        return drafter

    def check_trainable(self, config: BlockConfig) -> None:
        if config.selector_rank:
            raise ValueError(
                f"selector_rank={config.selector_rank} is invalid in training: a choice among candidates gives all "
                "other tokens no probability, and no loss compares that with the target; expected a drafter without "
                "a selector"
            )
        for name in ("domino_rank", "xpress_rank"):
            if rank := getattr(config, name):
                raise ValueError(
                    f"{name}={rank} is invalid in training: the heads of Domino and XPress are read from published "
                    "drafters only; expected markov_rank"
                )
        if config.markov_rank and config.markov_head_type == "rnn" and not config.sample_from_anchor:
            raise ValueError(
                "markov_head_type='rnn' is invalid in training with sample_from_anchor=False: expected 'vanilla' or "
                "'gated', or sample_from_anchor=True"
            )

    def continued(self, drafter: BlockDrafter, fields: Mapping[str, Any]) -> None:
        """A confidence head is left out: no objective trains it, so it would be stale."""
        if drafter.config.confidence_head != "none":
            drafter.config, drafter.confidence_head = replace(drafter.config, confidence_head="none"), None
            logger.warning(
                "the drafter's confidence head is left out of what is trained and saved, as no objective here trains it"
            )
        super().continued(drafter, fields)

    def bias_rows(self, drafter: BlockDrafter) -> torch.Tensor | None:
        return None if drafter.token_head is None else drafter.token_head.rows

    def describe(self, drafter: BlockDrafter) -> str:
        config = drafter.config
        head = f"{config.markov_head_type} head of rank {config.markov_rank}" if config.markov_rank else "no token head"
        return f"{config.num_hidden_layers} layers, {head}"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.model.token_head, self.model.lm_head)

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        mask = torch.tensor(self.model.config.mask_token_id, device=tokens.device)
        return {"mask_embeds": self.weights.embed(mask)}

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        head = self.model.token_head
        if head is None:
            return [None] * len(hidden_states)
        result: list[torch.Tensor | None] = [state := head.advance(tokens[:, 0], None)]
        for depth, hidden in enumerate(hidden_states[1:], 1):
            rows = hidden.shape[0]
            state = head.advance(tokens[:rows, depth], state[:rows], hidden_states[depth - 1][:rows])
            result.append(state)
        return result

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits, head = self.model.logits(hidden, self.weights), self.model.token_head
        return logits if head is None or states is None else head.keep_candidates(logits) + head(hidden, states)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


TRAINABLE[BlockFamily.name] = BlockFamily()
