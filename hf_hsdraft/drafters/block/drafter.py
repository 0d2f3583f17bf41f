"""The block drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ...core.tuning import TUNING
from ...hub.checkpoint import LOOSE_MASK
from ...runtime.target_limits import text_config
from ..base.draft_options import DraftOptions, default_options
from ..base.protocol import Call, Read, weights_of
from ..base.published import speculators_document
from ..base.refiners import REFINER_OPTIONS, check_refiners
from ..base.saved_drafter import PublishedDrafter, SpeculatorsFiles
from .configuration import BlockConfig
from .network import BlockNetwork
from .options import CONFIDENCE
from .session import BlockSession

logger = logging.get_logger(__name__)

# Class names that engines use.
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


class BlockDrafter(BlockNetwork, PublishedDrafter):
    """Drafts a whole block of tokens in one forward (DFlash, DFlash2, DSpark).

    Reads hidden states of the target and borrows its embedding, and its output layer if it drafts the whole vocabulary.
    Drafting options are in `generation_config`, as for every drafter.

    `AutoDrafter` loads published drafters unchanged; [`BlockDrafter.for_target`] makes a new one. Saved in the
    speculators format, which vLLM reads too.
    """

    takes_tree_builders = True
    why_not_refined = ""
    own_options = (*REFINER_OPTIONS, CONFIDENCE)

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.name_or_path = ""
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(cls, target: Any, draft_vocab_ids: Sequence[int] | None = None, **overrides: Any) -> BlockDrafter:
        """Makes an untrained drafter for a text-generating transformers model, in float32 on the CPU.

        `draft_vocab_ids` are the draftable token ids, all by default; `overrides` as for
        `BlockConfig.for_target`. Raises a ValueError if one is invalid, or ids are not ascending or beyond the
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
        rows = output_head.weight.detach()
        self.lm_head.weight.copy_(rows[found.to(rows.device)])
        self.d2t.copy_(found - torch.arange(len(found)))  # type: ignore[operator]
        self.t2d.zero_()[found.to(self.device)] = True  # type: ignore[operator]

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        config = replace(self.config, target_name=target_name or self.config.target_name)
        state = self.state_dict()
        loose = {LOOSE_MASK: state.pop("mask_embedding")} if config.learned_mask else {}
        return SpeculatorsFiles(_document(config, self.dtype), state, loose)

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

    def default_generation_config(self) -> GenerationConfig:
        steps = self.config.num_draft_steps
        return default_options(steps, tree_size=max(24, steps), beam_width=8, own=self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)

    def check(self, target: Any) -> None:
        super().check(target)
        tokens, mask = text_config(target).vocab_size, self.config.mask_token_id
        if mask >= tokens:
            self.refuse(f"the drafter reads token {mask} as its mask, the target has {tokens} tokens")

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config = self.config
        columns = config.draft_vocab_size or 0
        found = (
            Read("fusion", weights_of(self.fc), 1, 1),
            Read("layers", weights_of(self.layers), 1, config.block_size),
            Read("head", columns * config.sizes.hidden_size, 1, config.num_draft_steps, borrowed=self.lm_head is None),
        )
        rank = config.markov_rank or config.selector_rank or config.domino_rank
        if not rank:
            return found
        likely = min(columns, TUNING.likely_columns)  # trees only consider these
        return (*found, Read("token bias", likely * rank, depth, width))

    def session(self, call: Call) -> BlockSession:
        weights = self.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return BlockSession(self, weights, call)


def _kind_of(config: BlockConfig) -> str:
    """Returns the type of drafter: `"dflash"`, `"dflash2"` or `"dspark"`."""
    if config.selector_rank:
        return "dflash2"
    heads = config.markov_rank > 0 or config.confidence_head != "none"
    return "dspark" if heads or config.sample_from_anchor else "dflash"


def _document(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a drafter's config.json; raises a ValueError if the format cannot express what the drafter computes."""
    _check_can_be_written(config)
    kind = _kind_of(config)
    heads: dict[str, Any] = {}
    if kind == "dspark":
        heads = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": config.confidence_head != "none",
            "confidence_head_with_markov": config.confidence_head == "markov",
        }
    if kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        heads = {name: getattr(config, name) for name in names}
    if config.embedding_scale is None:
        heads["target_scales_embeddings"] = True
    return speculators_document(
        config,
        kind,
        _ARCHITECTURES[kind],
        dtype,
        "qwen3",
        config.sizes,
        [sight.reach for sight in config.sights],
        aux_hidden_state_layer_ids=list(config.target_tap_layers),
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        sample_from_anchor=config.sample_from_anchor,
        sliding_window_non_causal=not any(sight.causal for sight in config.sights),
        **heads,
    )


def _check_can_be_written(config: BlockConfig) -> None:
    """Raises a ValueError for anything the format has no field for."""
    sights = [sight for sight in config.sights if sight.reach is not None or sight.causal]
    one_rule = len({(sight.reach, sight.causal) for sight in sights}) <= 1
    told = {
        "a sliding window that each slot counts by itself": any(
            sight.reach and not sight.of_anchor for sight in sights
        ),
        "slots that see no later ones in a layer without a window": any(sight.reach is None for sight in sights),
        "several sliding windows": not one_rule,
        "a factor of embeddings": config.embedding_scale not in (None, 1.0),
        "a factor or a cap of logits": config.output_multiplier != 1.0 or config.final_logit_softcapping != 0.0,
        "any target's vocabulary": config.vocab_size is None,
        "an output of the target's last layer after its norm, or one that may be that": config.last_tap_is_normed
        and config.target_tap_layers[-1] == (config.target_num_hidden_layers or config.target_tap_layers[-1]),
        "layers of Gemma 4": config.sizes.gemma,
        "a bias by a recurrent network": config.domino_rank > 0,
        "convolutions without a selector": bool(config.conv_kernel_size) and not config.selector_rank,
    }
    if found := [name for name, is_so in told.items() if is_so]:
        raise ValueError(
            f"this drafter has {' and '.join(found)}, which the format of speculators cannot say: keep the files that "
            "it was loaded from"
        )
