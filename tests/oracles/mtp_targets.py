"""Tiny targets with layers for multi-token prediction, of every model type that has them: random, or right or wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import MtpModel

from hf_hsdraft import harmless
from hf_hsdraft.methods.mtp.kinds import KINDS, described_target
from oracles.plain_texts import each_with_its_seed
from oracles.tiny import tiny_config, tiny_model

_LAYERS = {
    "glm4_moe": 1,
    "deepseek_v3": 2,
    "kimi_k25": 1,
    "sarvam_mla": 1,
    "sarvam_moe": 3,
    "step3p7": 3,
    "mellum": 1,
    "qwen3_next": 1,
    "qwen3_5_text": 1,
    "inkling_text": 2,
}
_OWN_LISTS = (
    "deepseek_v32",
    "glm_moe_dsa",
    "hy_v4",
    "inkling_text",
    "mimo_v2_flash",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
)  # types that do not run with full attention alone, or never do
GENERATING = {**AutoModelForCausalLM._model_mapping, **AutoModelForImageTextToText._model_mapping}
LAYERS = {name: count for name, count in _LAYERS.items() if name in CONFIG_MAPPING}  # sarvam since 5.24


@cache
def made(model_type: str, count: int) -> tuple[Any, MtpModel]:
    """A target and random layers for multi-token prediction."""
    config = tiny_config(type(AutoConfig.for_model(model_type)), "anew" if model_type in _OWN_LISTS else "full")
    text = config.get_text_config()
    if model_type == "glm_ocr":
        text.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    if text.model_type not in KINDS or hasattr(text, "num_mtp_layers"):
        text.num_mtp_layers = count
    if model_type in ("step3p7", "mellum"):
        types = ["sliding_attention", "full_attention"]
        text.sliding_window, text.layer_types = 8, (types * text.num_hidden_layers)[: text.num_hidden_layers]
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        text.rope_parameters = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 500.0}}
        text.mtp_layer_types = (types * count)[:count]
        text.mtp_mlp_layer_types = list(text.mlp_layer_types[-1:]) * count
    model_class = GENERATING[type(config)]
    target = tiny_model(model_class, config)
    torch.manual_seed(1)
    layers = described_target(target, count).model().eval()
    for name, weight in layers.named_parameters():
        if name.startswith("layers.") and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return target, layers


@torch.no_grad()
def counting(model_type: str, count: int, right: bool = True) -> tuple[Any, MtpModel]:
    """A target by which a token is followed by the next one, and layers that say so too, or the one before.

    Attention and feed-forward add nothing, so an output is the normed embedding of the token read.
    """
    target, layers = copy.deepcopy(made(model_type, count))
    generator = torch.Generator().manual_seed(2)
    for module in (target, layers):
        for name, weight in module.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "out_proj", ".dense.", "input_mix_weight_up")):
                weight.zero_()
            elif "norm" in name and weight.dim() == 1:
                weight.fill_(0.0 if float(weight.abs().max()) == 0 else 1.0)
    embeddings = target.get_input_embeddings().weight.normal_(generator=generator)
    target.get_output_embeddings().weight.copy_(embeddings.roll(1, 0))
    layers.tie_with_main_model(target)
    for layer in layers.layers:
        width = layers.config.hidden_size
        if hasattr(layer.eh_proj, "fc_hidden"):  # of several streams
            layer.eh_proj.fc_hidden.weight.zero_()
            of_embedding = layer.eh_proj.fc_embedding.weight
        else:
            halves = layer.eh_proj.weight.zero_().split(width, dim=1)
            of_embedding = halves[bool(getattr(layers.config, "mtp_hidden_states_first", False))]
        of_embedding.copy_(torch.eye(width) if right else torch.randn(width, width, generator=generator))
    return target, layers


def each_plain(target: Any, inputs: dict[str, torch.Tensor], seed: int, **call: Any) -> torch.Tensor:
    """Plain decoding's texts with the seeds that a drafted call's rows get."""
    torch.manual_seed(seed)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if len(ids) == 1 or not call["do_sample"]:
        return target.generate(**inputs, **call)
    return each_with_its_seed(target, ids, mask, seed, **call)


def forwards_of(target: Any, run: Callable[[], Any]) -> tuple[Any, int]:
    """Returns what `run` returns, and how often it calls the target's forward."""
    calls: list[None] = []
    hook = target.register_forward_hook(harmless(lambda *_: calls.append(None)))
    try:
        return run(), len(calls)
    finally:
        hook.remove()
