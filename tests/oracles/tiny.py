"""Tiny random models of any type of transformers, made from its configuration class alone."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedConfig

VOCABULARY = 99
_LAYERS = 4
_PARAMETERS = 30_000_000  # a model with more parameters was not made small

# The first pattern that matches decides. Sizes that depend on each other (heads and head size, groups of experts) fit.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?$", VOCABULARY),
    (r"pad_token_id$", 0),
    (r"(decoder_start|bos)_token_id$", 1),
    (r"num_nextn_predict_layers$|num_mtp", 0),
    (r"first_k_dense|moe_layer_start|num_dense_layers$|mlp_only", 1),
    (r"num_kv_shared_layers$", 0),
    (r"(n_layer|layers|depth)$", _LAYERS),
    (r"encoder_layers$|num_encoder_layers$|transformer_layers$", 2),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|kv_heads)$", 2),
    (r"(num_attention_heads|num_heads|n_heads?|attention_heads|num_query_heads)$", 4),
    (r"mamba_d_head|mamba_head_dim|qk_head_dim", 16),
    (r"head_dim|d_kv|d_head$|kv_channels|head_size", 8),
    (r"lora_rank|lora_dim|lowrank|low_rank", 8),
    (r"rotary_dim$", 8),
    (r"attn_layer_period|expert_layer_period|full_attn_interval|full_attention_interval|layer_group_size", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|moe_top_k|top_k_experts|num_selected_experts)$", 2),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_moe_experts)$", 4),
    (r"n_shared_experts|moe_num_shared_experts|n_group$|topk_group|num_expert_group", 1),
    (r"(index_topk|keep_window_size|log_scaling_n_floor)$", 24),  # reached within a few tokens
    (r"(index_kpool|index_block_size)$", 4),
    (r"index_topk_blocks$", 3),
    (r"floor_scale$", 32),
    (r"(sliding_window|attention_window_size|attention_chunk_size|window_size)$", 8),
    (r"(max_position_embeddings|n_positions|(target|source)_positions|n_ctx|max_seq_len|seq_length)$", 256),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|ffn_embed_dim|inner_dim)$", 64),
    (r"image_size$", 28),
    (r"patch_size$", 14),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|embedding_size|word_embed_proj_dim|d_embed|width)$", 32),
    (r"(out_hidden_size|projection_dim|project_dim|proj_dim|embed_dims|hidden_size_per_layer_input|output_size)$", 32),
    (r"(mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_key_heads|linear_num_value_heads|time_mix_heads)$", 4),
    (r"(state_size|mamba_d_state|ssm_state_size|d_state|mamba_d_ssm|time_step_rank|mamba_dt_rank)$", 16),
    (r"(n_groups|mamba_n_groups)$", 1),
)
# Sizes that a configuration class leaves open, and that files have.
_OPEN = {
    "head_dim": 8, "num_key_value_heads": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 24, "indexer_compress_ratio": 4,
}  # fmt: skip
# Types of layers that files have, where a configuration class makes all layers full attention.
_LAYER_TYPES = {"minimax_m3_vl_text": ["full_attention", "minimax_m3_sparse"]}
_STD = re.compile(r"(initializer_range|init_std|initializer_factor|initializer_range_mlp)$")


class NotTiny(ValueError):
    """A configuration whose sizes could not be made small."""


def shrunk(config: PreTrainedConfig, layer_lists: str = "anew") -> dict[str, Any]:
    """Returns the fields of a configuration with small sizes.

    Lists with one entry per layer are left to the configuration class (`"anew"`), keep an entry of each kind (`"cut"`),
    or make all layers full attention (`"full"`).
    """
    fields: dict[str, Any] = {}
    latent = _field(config, "kv_lora_rank") is not None  # then every head has its own keys
    old_layers = _field(config, "num_hidden_layers")
    for name, value in config.to_dict().items():
        inner = _field(config, name)
        if isinstance(inner, PreTrainedConfig):
            fields[name] = {**shrunk(inner, layer_lists), "model_type": inner.model_type}
        elif name == "layer_types" and layer_lists == "full":
            fields[name] = ["full_attention"] * _LAYERS
        elif name == "layer_types" and config.model_type in _LAYER_TYPES:
            fields[name] = (_LAYER_TYPES[config.model_type] * _LAYERS)[:_LAYERS]
        elif isinstance(value, list) and value and len(value) == old_layers:
            if layer_lists == "cut":
                kinds = list(dict.fromkeys(map(str, value)))[:_LAYERS]
                places = [list(map(str, value)).index(kind) for kind in kinds]
                fields[name] = [value[places[index % len(places)]] for index in range(_LAYERS)]
        elif isinstance(value, dict) and "mrope_section" in value:
            fields[name] = {**value, "mrope_section": [2, 1, 1]}  # adds up to half of a head of 8
        elif _STD.search(name) and isinstance(value, float):
            fields[name] = 1.0 if "factor" in name else 0.2
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((size for pattern, size in _SIZES if re.search(pattern, name)), value)
            if value == 0 and name.endswith("head_dim"):  # without a rotary embedding
                small = 0
            if latent and name == "num_key_value_heads":
                small = 4
            if re.search(r"token_(id|index)$", name) and small >= VOCABULARY:
                small = VOCABULARY - 1 - sum(map(ord, name)) % 8
            fields[name] = None if name == "eos_token_id" else small
        elif name == "eos_token_id":
            fields[name] = None
        elif value is None and name in _OPEN:
            fields[name] = _OPEN[name]
        elif name == "attention_types":
            fields[name] = [[["global", "local"], _LAYERS // 2]]
        elif name == "is_decoder":
            fields[name] = True
    return fields


def _field(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field that differs by layer raises an error
        return None


def tiny_config(config_class: type[PreTrainedConfig], layer_lists: str = "anew") -> PreTrainedConfig:
    """Returns a configuration of a class with a few small layers and no end-of-text token."""
    fields = shrunk(config_class(), layer_lists)
    fields.pop("model_type", None)
    fields.pop("transformers_version", None)
    return config_class(**fields)


def tiny_model(model_class: Any, config: PreTrainedConfig, seed: int = 0) -> Any:
    """Returns a random model in float32, in evaluation mode; a NotTiny if the configuration was not made small."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if size > _PARAMETERS:
        raise NotTiny(f"{size / 1e6:.0f}M parameters are not tiny")
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens"):
        if model.generation_config is not None:
            setattr(model.generation_config, name, None)
    if model.generation_config is not None:
        model.generation_config.pad_token_id = 0
        model.generation_config.decoder_start_token_id = model.generation_config.decoder_start_token_id or 1
    return model
