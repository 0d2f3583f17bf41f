"""The block drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ...core.checks import printable
from ...core.refusals import DraftingRefused
from ...core.tuning import TUNING
from ...hub.checkpoint import LOOSE_MASK
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_outputs import before_norm, check_last_state
from ..base.draft_options import DraftOptions, default_options
from ..base.protocol import Call, Read, weights_of
from ..base.refiners import REFINER_OPTIONS, check_refiners
from ..base.saved_drafter import PublishedDrafter, SpeculatorsFiles
from .block_session import BlockSession
from .configuration import BlockConfig
from .network import BlockNetwork, frozen_rows
from .writing import config_document

logger = logging.get_logger(__name__)


class BlockDrafter(BlockNetwork, PublishedDrafter):
    """Drafts a whole block of tokens in one forward (DFlash, DFlash2, DSpark).

    Reads hidden states of the target and borrows its embedding, and its output layer if it drafts the whole vocabulary.
    Drafting options are in `generation_config`, as for every drafter.

    `AutoDrafter` loads published drafters unchanged; [`BlockDrafter.for_target`] makes a new one. Saved in the
    speculators format, which vLLM reads too.
    """

    takes_tree_builders = True
    why_not_refined = ""
    own_options = REFINER_OPTIONS

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.name_or_path = ""
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(cls, target: Any, draft_vocab_ids: Sequence[int] | None = None, **overrides: Any) -> BlockDrafter:
        """Makes an untrained drafter for a text-generating transformers model, in float32 on the CPU.

        `draft_vocab_ids` are the draftable token ids, all by default; `overrides` as for
        `BlockConfig.for_target_config`. Raises a ValueError if one is invalid, or ids are not ascending or beyond the
        vocabulary.
        """
        if draft_vocab_ids is not None:
            overrides["draft_vocab_size"] = len(draft_vocab_ids)
        drafter = cls(BlockConfig.for_target(target, **overrides))
        drafter.reset_parameters()
        if drafter.config.has_own_head:
            if draft_vocab_ids is None:
                raise ValueError("draft_vocab_size is given without draft_vocab_ids: expected the ids of these tokens")
            drafter.take_head(target.get_output_embeddings(), draft_vocab_ids)
        return drafter

    @torch.no_grad()
    def take_head(self, output_head: Any, ids: Sequence[int]) -> None:
        """Copies the target's output rows of `ids` `[V']`; raises a ValueError unless they are ascending and known."""
        size = self.config.vocab_size or 0
        found = torch.tensor(list(ids))
        if len(found) != self.config.draft_vocab_size or bool((found.diff() <= 0).any()) or found[0] < 0:
            raise ValueError(f"draft_vocab_ids is invalid: expected {self.config.draft_vocab_size} ascending token ids")
        if found[-1] >= size:
            raise ValueError(f"draft_vocab_ids holds {int(found[-1])}: expected ids below vocab_size={size}")
        assert self.lm_head is not None
        self.lm_head.weight.copy_(frozen_rows(output_head, ids))
        self.d2t.copy_(found - torch.arange(len(found)))  # type: ignore[operator]
        self.t2d.zero_()[found.to(self.device)] = True  # type: ignore[operator]

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        config = replace(self.config, target_name=target_name or self.config.target_name)
        state = self.state_dict()
        loose = {LOOSE_MASK: state.pop("mask_embedding")} if config.learned_mask else {}
        return SpeculatorsFiles(config_document(config, self.dtype), state, loose)

    def export(self, form: str, folder: str | os.PathLike[str], target_name: str = "") -> None:
        if self.config.learned_mask:
            raise ValueError(
                f"this drafter cannot be written in the format {form!r}: its masks have an embedding of their own, for "
                f"which that format has no field. `save_pretrained` keeps it in {LOOSE_MASK}, which only this package "
                "reads"
            )
        if self.config.embedding_scale is None:
            logger.warning(
                f"in the format {form!r} this drafter reads the target's embedding rows as they are. If its target "
                "multiplies them by a factor, as Gemma does, other programs will accept less than is accepted here"
            )
        super().export(form, folder, target_name)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return self.config.target_tap_layers

    def taps_of(self, target: Any) -> Sequence[int]:
        taps = self.config.target_tap_layers
        return taps if self.config.last_tap_is_normed else before_norm(taps, decoder_layers(text_config(target)))

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    def default_generation_config(self) -> GenerationConfig:
        steps = self.config.num_draft_steps
        return default_options(steps, tree_size=max(24, steps), beam_width=8, own=self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)

    def check(self, target: Any) -> None:
        config, wanted = text_config(target), self.config
        layers, taps = decoder_layers(config), wanted.target_tap_layers
        made_for = f"this drafter was made for {printable(wanted.target_name) or 'another target'}"
        for name, found, expected in (
            ("vocab_size", config.vocab_size, wanted.vocab_size),
            ("hidden_size", config.hidden_size, wanted.target_hidden_size),
            ("num_hidden_layers", layers, wanted.target_num_hidden_layers),
        ):
            if expected is not None and found != expected:
                raise DraftingRefused(
                    f"the target has {name}={found}, the drafter expects {expected}: {made_for}. Use a drafter of this "
                    "target, or train one."
                )
        if taps[-1] > layers or wanted.mask_token_id >= config.vocab_size:
            raise DraftingRefused(
                f"the drafter reads hidden state {taps[-1]} and token {wanted.mask_token_id} as its mask, the target "
                f"has {layers} layers and {config.vocab_size} tokens: {made_for}. Use a drafter of this target."
            )
        if taps[-1] == layers and not wanted.last_tap_is_normed:
            check_last_state(target)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config = self.config
        columns = config.draft_vocab_size or 0
        found = (
            Read("fusion", weights_of(self.fc), 1, 1),
            Read("layers", weights_of(self.layers), 1, config.block_size),
            Read("head", columns * config.sizes.hidden_size, 1, config.num_draft_steps, borrowed=self.lm_head is None),
        )
        rank = config.markov_rank or config.selector_rank
        if not rank:
            return found
        likely = min(columns, TUNING.likely_columns)  # trees only consider these
        return (*found, Read("token bias", likely * rank, depth, width))

    def session(self, call: Call) -> BlockSession:
        target, options = call.target, call.options
        weights = self.borrow(target.get_input_embeddings(), target.get_output_embeddings())
        return BlockSession(self, weights, options, batch_size=call.rows, foresight=call.foresight)
