"""Layers for multi-token prediction that are none of the target's own, with a formula of transformers' modules.

- LongCat-Flash: DeepSeek-V3's dense layer with scaled norms, as vLLM computes it (`longcat_flash_mtp.py`).
- HY-V4: the modules of its other layers without their streams (`models/hy_v4`).
- Dots 3 Note: one of its layers, with an embedding of its own (`models/dots3_note`).
- Nemotron-H: an attention and a mixture of experts (`nemotron_h_mtp.py`), here layers of a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Dots3NoteForCausalLM,
    Dots3NoteTextConfig,
    HYV4Config,
    HYV4ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention, HYV4MoE, HYV4RMSNorm

from oracles.format_parity import randomise
from oracles.mtp_targets import GENERATING
from oracles.tiny import VOCABULARY, tiny_config, tiny_model

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_OUTSIDE = ("enorm", "hnorm", "eh_proj", "final")


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def outside_parts(size: int, seed: int = 4) -> dict[str, torch.Tensor]:
    """Returns random norms and projection of a layer."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(size, generator=generator) * 0.2 + 1.0 for name in _OUTSIDE}
    return {**found, "eh_proj": torch.randn(size, 2 * size, generator=generator) * 0.3}


def saved(folder: Path, target: Any, layers: dict[str, torch.Tensor], **told: Any) -> Any:
    """Writes a target and its layers, and loads it again."""
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {name: each.clone() for name, each in layers.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, value in told.items():
        setattr(target.config, name, value)
    target.config.save_pretrained(folder)
    again = type(target).from_pretrained(folder, dtype=torch.float32).eval()
    again.generation_config.eos_token_id = None
    return again


def _logits(
    target: Any,
    outside: dict[str, torch.Tensor],
    eps: float,
    run: Callable[[torch.Tensor], Any],
    table: torch.Tensor | None = None,
) -> Logits:
    """Returns logits `[1, V]` of the layer, of which `run` is what lies between the projection and the last norm.

    `table` are its embeddings, if they are not the target's.
    """
    rows = target.get_input_embeddings().weight if table is None else table

    def logits(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embeds = rms(rows[tokens[1:]], outside["enorm"], eps)
        x = torch.cat([embeds, rms(states, outside["hnorm"], eps)], dim=-1) @ outside["eh_proj"].T
        y = rms(run(x[None])[0, -1], outside["final"], eps)
        return (y @ target.get_output_embeddings().weight.T)[None]

    return logits


def causal(count: int) -> torch.Tensor:
    return torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]


def longcat(folder: Path) -> tuple[Any, Logits]:
    config = tiny_config(type(AutoConfig.for_model("longcat_flash")), "full")
    target = tiny_model(GENERATING[type(config)], config)
    same = (
        "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings",
    )  # fmt: skip
    fields = {name: getattr(config, name) for name in same}
    theirs = DeepseekV3Config(
        **fields, num_key_value_heads=config.num_attention_heads, intermediate_size=config.ffn_hidden_size,
        first_k_dense_replace=1, num_hidden_layers=1,
    )  # fmt: skip
    theirs._attn_implementation = "eager"
    layer, rotary = DeepseekV3DecoderLayer(theirs, 0).eval(), DeepseekV3RotaryEmbedding(theirs)
    randomise(layer, 0.2)
    place, outside = "model.mtp.layers.0.", outside_parts(config.hidden_size)
    inside = {
        place + name.replace("mlp.", "transformer_layer.mlp."): each.clone()
        for name, each in layer.state_dict().items()
    }
    files = {
        **inside, f"{place}enorm.m.weight": outside["enorm"], f"{place}hnorm.m.weight": outside["hnorm"],
        f"{place}eh_proj.weight": outside["eh_proj"], "model.mtp.norm.weight": outside["final"],
        "model.mtp.embed_tokens.weight": target.get_input_embeddings().weight.detach(),
    }  # fmt: skip
    for norm, rank in (
        (layer.self_attn.q_a_layernorm, "q_lora_rank"),
        (layer.self_attn.kv_a_layernorm, "kv_lora_rank"),
    ):
        norm.weight.mul_((config.hidden_size / fields[rank]) ** 0.5)

    def run(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(1, x.shape[1] + 1)[None]
        return layer(x, attention_mask=causal(x.shape[1]), position_ids=at, position_embeddings=rotary(x, at))

    target = saved(folder, target, files)
    return target, _logits(target, outside, config.rms_norm_eps, run)


def hunyuan(folder: Path) -> tuple[Any, Logits]:
    config = tiny_config(HYV4Config)
    target = tiny_model(HYV4ForCausalLM, config)
    parts = torch.nn.ModuleDict({
        "self_attn": HYV4Attention(config, 0), "mlp": HYV4MoE(config),
        "input_layernorm": HYV4RMSNorm(config.hidden_size), "post_attention_layernorm": HYV4RMSNorm(config.hidden_size),
    }).eval()  # fmt: skip
    for norm in (parts["input_layernorm"], parts["post_attention_layernorm"]):
        norm.variance_epsilon = config.rms_norm_eps
    randomise(parts, 0.2)
    outside, place = outside_parts(config.hidden_size), "model.mtp_layers.0."
    published = {"self_attn.gate_proj": "self_attn.linear_gate", "sinks": "learnable_sink_param"}
    files = {}
    for name, each in parts.state_dict().items():
        for ours, theirs in published.items():
            name = name.replace(ours, theirs)
        files[place + name] = each
    names = {"final": "final_layernorm"}
    files |= {f"{place}{names.get(name, name)}.weight": each for name, each in outside.items()}

    def run(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(1, x.shape[1] + 1)[None]
        rope, mask = target.model.rotary_emb(x, position_ids=at), causal(x.shape[1])
        x = x + parts["self_attn"](parts["input_layernorm"](x), rope, mask)[0]
        return x + parts["mlp"](parts["post_attention_layernorm"](x))

    target = saved(folder, target, files, num_nextn_predict_layers=1)
    return target, _logits(target, outside, config.rms_norm_eps, run)


_DOTS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "shared_experts_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 16, "index_topk": 24, "index_head_dim": 8, "index_n_heads": 4,
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 256,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 12, "swa_kv_lora_rank": 12,
    "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 12, "initializer_range": 0.2,
}  # fmt: skip


def dots(folder: Path) -> tuple[Any, Logits]:
    config = Dots3NoteTextConfig(**_DOTS)
    target = tiny_model(Dots3NoteForCausalLM, config)
    layer = copy.deepcopy(target.model.layers[-1])
    randomise(layer, 0.2)
    outside, place = outside_parts(config.hidden_size), f"model.layers.{config.num_hidden_layers}."
    second = copy.deepcopy(target)
    second.model.layers[-1] = layer
    second.save_pretrained(folder / "second")
    stored, last = load_file(folder / "second" / "model.safetensors"), f"layers.{config.num_hidden_layers - 1}."
    files = {place + name.partition(last)[2]: each for name, each in stored.items() if last in name}
    names = {"final": "shared_head.norm"}
    files |= {f"{place}{names.get(name, name)}.weight": each for name, each in outside.items()}
    table = torch.randn(VOCABULARY, config.hidden_size, generator=torch.Generator().manual_seed(6))
    files["model.mtp.embed_tokens.weight"] = table

    def run(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(1, x.shape[1] + 1)[None]
        rope = target.model.rotary_emb(x, at, "sliding_attention")
        far = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).tril(-config.sliding_window)
        return layer(x, attention_mask=causal(x.shape[1]) + far, position_embeddings=rope, position_ids=at)

    target = saved(folder, target, files, num_nextn_predict_layers=1)
    return target, _logits(target, outside, config.rms_norm_eps, run, table)


def nemotron(folder: Path, prefix: str = "mtp.") -> tuple[Any, Logits]:
    config = tiny_config(NemotronHConfig, "anew")
    target = tiny_model(NemotronHForCausalLM, config)
    fields = {name: each for name, each in config.to_dict().items() if name not in ("layer_types", "model_type")}
    second = NemotronHForCausalLM(NemotronHConfig(**{**fields, "layers_block_type": ["full_attention", "moe"]})).eval()
    randomise(second, 0.2)
    blocks, outside = second.model.layers, outside_parts(config.hidden_size)
    second.save_pretrained(folder / "second")
    stored = load_file(folder / "second" / "model.safetensors")
    stem = next(name.partition("layers.")[0] for name in stored if "layers." in name)
    files = {
        name.replace(f"{stem}layers.", f"{prefix}layers."): each for name, each in stored.items() if "layers." in name
    }
    names = {"enorm": "0.enorm", "hnorm": "0.hnorm", "eh_proj": "0.eh_proj", "final": "1.final_layernorm"}
    files |= {f"{prefix}layers.{names[name]}.weight": each for name, each in outside.items()}

    def run(x: torch.Tensor) -> torch.Tensor:
        return blocks[1](blocks[0](x, attention_mask=causal(x.shape[1])))

    target = saved(folder, target, files, num_nextn_predict_layers=1)
    return target, _logits(target, outside, config.layer_norm_epsilon, run)
