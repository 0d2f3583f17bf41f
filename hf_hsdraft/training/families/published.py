"""Training of drafters in the formats of other projects: block drafters and EAGLE's.

Block drafters are DSpark's, and DFlash's in either layout. EAGLE-3 drafters learn by a training-time test ("EAGLE-3",
section 3.2), or all depths at once (P-EAGLE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ...core.checks import demand, public_name
from ...drafters.base.decoder_layer import LayerSizes
from ...drafters.base.draft_options import leave_folder
from ...drafters.block.configuration import BlockConfig
from ...drafters.block.drafter import BlockDrafter
from ...drafters.eagle.configuration import EagleConfig
from ...drafters.eagle.drafter import EagleDrafter, check_can_be_written
from .family import KEPT, OPTIONS, Choose, TrainableFamily, name_of, trained

logger = logging.get_logger(__name__)


class PublishedFamily(TrainableFamily):
    """Families whose configurations are frozen dataclasses without drafting options."""

    config: Any  # class of the configurations, with `for_target(target, **fields)`
    free: tuple[str, ...] = ("target_name",)  # fields of a configuration on which no weights depend

    @property
    def fields(self) -> set[str]:
        own = {field.name for kind in (self.config, LayerSizes) for field in fields_of(kind)}
        return own | {"num_draft_steps", "draft_vocab_ids", *OPTIONS}

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> Any:
        config = self.derived(target, fields)
        with torch.device("meta"):
            self.set_options(self.drafter(config), fields)
        return config

    def derived(self, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns a configuration. Its draft vocabulary defaults to a quarter of the target's until one is chosen."""
        own = {name: value for name, value in fields.items() if name not in OPTIONS}
        size = target.config.get_text_config().vocab_size
        ids = own.get("draft_vocab_ids")
        own.setdefault("draft_vocab_size", max(1, size // 4) if ids is None else len(ids))
        return self.config.for_target(target, **_named(own))

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        self.check_trainable(drafter.config)
        leave_folder(drafter)
        fields = _named(fields)
        drafter.config = replace(drafter.config, **{name: fields[name] for name in self.free if name in fields})
        drafter.generation_config.num_assistant_tokens = drafter.num_draft_steps
        self.set_options(drafter, fields)
        for name, value in fields.items():
            if name not in (*OPTIONS, *self.free):
                found, wanted = _found(drafter.config, name), tuple(value) if isinstance(value, list) else value
                demand(found == wanted, name, wanted, KEPT.format(found))

    def record_target(
        self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        drafter.check(target)
        architecture = type(target).__name__.removeprefix("FSDP")  # a sharded target is the same target
        told = {"target_name": name_of(target, name), "target_architectures": (architecture,)}
        drafter.config = replace(drafter.config, **told)


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same fields, with the target's name as it may be published."""
    names = {name: public_name(str(value)) for name, value in fields.items() if name == "target_name"}
    return {**fields, **names}


def _found(config: Any, name: str) -> Any:
    """Returns a field of a configuration, or of the sizes of its layers."""
    parts = [config, *(value for value in vars(config).values() if isinstance(value, LayerSizes))]
    value = next((getattr(part, name) for part in parts if hasattr(part, name)), None)
    return tuple(value) if isinstance(value, list) else value


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
