"""Writes a block drafter's configuration in the speculators format, which vLLM reads too."""

from __future__ import annotations

from typing import Any

import torch

from ..base.published import speculators_document
from .configuration import BlockConfig

# Class names that engines use.
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


def kind_of(config: BlockConfig) -> str:
    """Returns the type of drafter: `"dflash"`, `"dflash2"` or `"dspark"`."""
    if config.selector_rank:
        return "dflash2"
    heads = config.markov_rank > 0 or config.confidence_head != "none"
    return "dspark" if heads or config.sample_from_anchor else "dflash"


def config_document(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a drafter's config.json, with all switches, since readers have different defaults.

    Raises a ValueError if the format cannot express what the drafter computes.
    """
    _check_can_be_written(config)
    kind = kind_of(config)
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
        "a sliding window that each slot counts by itself": not all(sight.of_anchor for sight in sights),
        "several sliding windows": not one_rule,
        "a factor of embeddings": config.embedding_scale not in (None, 1.0),
        "a factor or a cap of logits": config.output_multiplier != 1.0 or config.final_logit_softcapping != 0.0,
        "any target's vocabulary": config.vocab_size is None,
        "an output of the target's last layer after its norm, or one that may be that": config.last_tap_is_normed
        and config.target_tap_layers[-1] == (config.target_num_hidden_layers or config.target_tap_layers[-1]),
        "layers of Gemma 4": config.sizes.gemma,
        "convolutions without a selector": bool(config.conv_kernel_size) and not config.selector_rank,
    }
    if found := [name for name, is_so in told.items() if is_so]:
        raise ValueError(
            f"this drafter has {' and '.join(found)}, which the format of speculators cannot say: keep the files that "
            "it was loaded from"
        )
