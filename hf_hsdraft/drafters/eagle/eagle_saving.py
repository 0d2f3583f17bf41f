"""Writes an EAGLE-3 drafter's configuration in the speculators format, which vLLM reads too."""

from __future__ import annotations

from typing import Any

import torch

from ...core.checks import public_name
from ...hub.speculators_format import speculators_fields
from .configuration_eagle import EagleConfig

_CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}


def vocabulary_maps(config: EagleConfig) -> dict[str, torch.Tensor]:
    """Returns `d2t` `[V']`, int64, from row to token, and `t2d` `[V]`, bool; nothing for a whole vocabulary."""
    if config.draft_vocab_size == config.vocab_size:
        return {}
    size = config.draft_vocab_size
    ids = torch.arange(size) if config.draft_vocab_ids is None else torch.tensor(config.draft_vocab_ids)
    rows = torch.zeros(config.vocab_size, dtype=torch.bool)
    rows[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": rows}


def fields_of(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a drafter's config.json, with all switches, since readers have different defaults."""
    kind, layer = "eagle3" if config.mask_token_id is None else "peagle", config.layer
    described = {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "hidden_act": layer.hidden_act,
        "attention_bias": layer.attention_bias,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        **config.rope,
    }
    window = next((window for window in config.windows if window is not None), None)
    if window is not None:
        kinds = ["full_attention" if each is None else "sliding_attention" for each in config.windows]
        described |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    taps = None if config.target_tap_layers is None else list(config.target_tap_layers)
    fields = {
        **speculators_fields(
            kind, config.num_draft_steps, public_name(config.target_name), config.target_architectures
        ),
        "architectures": [_CLASSES[kind]],
        "transformer_layer_config": described,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": taps,
        "num_draft_steps": config.num_draft_steps,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if not config.norm_output_told:  # the next load continues the trial
        fields["norm_output_told"] = False
    return fields if config.mask_token_id is None else {**fields, "mask_token_id": config.mask_token_id}
