"""Layers for multi-token prediction whose states are kept by text, with a formula of transformers' modules, uncached.

- Inkling: two of its dense layers, of which the second has a window; vLLM's `models/inkling/nvidia/mtp.py`.
- MiniMax-M3: one of its layers with chosen blocks of keys; vLLM's `models/minimax_m3/nvidia/mtp.py`.
- Qwen4-Exp: one of its layers with chosen groups of keys, on several streams; vLLM's `models/qwen4_exp/nvidia/mtp.py`.
- GLM-5.3-Flash: attention to chosen groups of keys and experts, on one stream; vLLM's `models/glm5next/common/mtp.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from oracles.format_parity import randomise
from oracles.mtp_blocks import Logits, causal, outside_parts, rms, saved
from oracles.mtp_targets import GENERATING
from oracles.tiny import shrunk, tiny_model


@dataclass(frozen=True)
class _Layer:
    """A layer, its projection and norms, and what is between the projection and the last norm."""

    outside: dict[str, torch.Tensor]
    run: Callable[[torch.Tensor], torch.Tensor]


def _config(model_type: str, text: dict[str, Any], **told: Any) -> Any:
    kind = type(AutoConfig.for_model(model_type))
    fields = shrunk(kind())
    left_out = ("model_type", "transformers_version")
    fields = {name: value for name, value in fields.items() if name not in left_out} | told
    small = {"patch_size": 4, "mel_vocab_size": 4, "temporal_patch_size": 2, "n_layers": 2}
    for part in (each for each in fields.values() if isinstance(each, dict) and "model_type" in each):
        part |= {each: value for each, value in small.items() if each in part}
    return kind(**{**fields, "text_config": fields["text_config"] | text})


def _files(folder: Path, target: Any, layer: torch.nn.Module, place: str) -> dict[str, torch.Tensor]:
    """Returns a layer's tensors as the files name them, as those of the target's last one, which stand in for them."""
    second, last = copy.deepcopy(target), len(target.get_decoder().layers) - 1
    second.get_decoder().layers[last] = layer
    second.save_pretrained(folder / "second")
    stored, mark = load_file(folder / "second" / "model.safetensors"), f"layers.{last}."
    own = {name: each for name, each in stored.items() if mark in name and "vision" not in name}
    return {place + name.partition(mark)[2]: each for name, each in own.items()}


def _chain(target: Any, layers: Sequence[_Layer], norm: Callable[..., torch.Tensor], **reading: Any) -> Logits:
    """Returns logits of a chain of one token a layer; each layer hands its output on after its last norm, or before."""
    states_first, hands_on_normed = reading["states_first"], reading["hands_on_normed"]

    def logits(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        ids, found = tokens[1:], []
        for layer in layers:
            embeds = norm(target.get_input_embeddings()(ids), layer.outside["enorm"])
            pair = [embeds, norm(states, layer.outside["hnorm"])]
            x = torch.cat(pair[::-1] if states_first else pair, dim=-1) @ layer.outside["eh_proj"].T
            made = layer.run(x[None])[0]
            normed = norm(made, layer.outside["final"])
            scale = getattr(target.config.get_text_config(), "logits_mup_width_multiplier", 1.0)
            found.append(normed[-1] / scale @ target.get_output_embeddings().weight.T)
            states = normed if hands_on_normed else made
            ids = torch.cat([ids[1:], found[-1].argmax()[None]])
        return torch.stack(found)

    return logits


def inkling(folder: Path) -> tuple[Any, Logits]:
    told = {"num_nextn_predict_layers": 2, "local_layer_ids": [1], "chain_hidden_post_norm": True}
    text = {"log_scaling_n_floor": None, "mlp_layer_types": ["sparse"] * 3 + ["dense"], "num_mtp_layers": 2}
    text |= {
        "chain_hidden_post_norm": True,
        "mtp_local_layer_ids": [1],
        "swa_num_key_value_heads": 2,
        "logits_mup_width_multiplier": 2.0,
    }
    config = _config("inkling_mm_model", text, mtp_config=told)
    target = tiny_model(GENERATING[type(config)], config)
    text_config, eps = config.text_config, config.text_config.rms_norm_eps
    target.get_input_embeddings().embed_norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    files: dict[str, torch.Tensor] = {}
    layers, final = [], outside_parts(text_config.hidden_size)["final"]
    for index, window in enumerate((None, text_config.sliding_window)):
        layer = type(target.get_decoder().layers[-1])(text_config.get_mtp_config(), index).eval()
        randomise(layer, 0.2, index)
        place = f"model.mtp.layers.{index}."
        files |= _files(folder, target, layer, f"{place}transformer_block.")
        outside = outside_parts(text_config.hidden_size, 4 + index) | {"final": final}
        names = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "input_proj"}
        files |= {f"{place}{published}.weight": outside[name] for name, published in names.items()}

        def run(x: torch.Tensor, layer: Any = layer, window: int | None = window) -> torch.Tensor:
            far = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).tril(-(window or x.shape[1]))
            return layer(x, attention_mask=causal(x.shape[1]) + far)

        layers.append(_Layer(outside, run))
    files["model.mtp.chain_norm.weight"] = final
    target = saved(folder, target, files)
    norm = lambda x, weight: rms(x, weight, eps)  # noqa: E731
    return target, _chain(target, layers, norm, states_first=True, hands_on_normed=True)


def minimax(folder: Path) -> tuple[Any, Logits]:
    types = ["full_attention", "minimax_m3_sparse"] * 2
    text = {"layer_types": types, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "index_block_size": 4}
    text |= {"index_topk_blocks": 3, "num_mtp_modules": 1, "index_n_heads": 2}
    config = _config("minimax_m3_vl", text)
    target = tiny_model(GENERATING[type(config)], config)
    layer, decoder, eps = (
        copy.deepcopy(target.get_decoder().layers[-1]),
        target.get_decoder(),
        config.text_config.rms_norm_eps,
    )
    randomise(layer, 0.2)
    outside, place = outside_parts(config.text_config.hidden_size), "language_model.model.mtp.layers.0."
    files = _files(folder, target, layer, f"{place}transformer_layer.")
    files |= {f"{place}{'final_layernorm' if name == 'final' else name}.weight": each for name, each in outside.items()}

    def run(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])[None]
        return layer(
            x, attention_mask=causal(x.shape[1]), position_ids=at, position_embeddings=decoder.rotary_emb(x, at)
        )

    target = saved(folder, target, files)
    norm = lambda x, weight: rms(x, 1 + weight, eps)  # noqa: E731
    return target, _chain(target, [_Layer(outside, run)], norm, states_first=False, hands_on_normed=False)


def glm(folder: Path) -> tuple[Any, Logits]:
    text = {"index_kpool": 4, "index_topk": 8, "qk_rope_head_dim": 0, "num_nextn_predict_layers": 1}
    config = _config("glm5_next", text | {"linear_conv_kernel_dim": 4})
    target = tiny_model(GENERATING[type(config)], config)
    own, eps = copy.deepcopy(target.get_decoder().layers[-1]), config.text_config.rms_norm_eps
    randomise(own, 0.2)
    outside, place = outside_parts(config.text_config.hidden_size), "model.language_model.layers.4."
    files = {name: each for name, each in _files(folder, target, own, place).items() if ".hc_" not in name}
    files |= {
        f"{place}{'shared_head.norm' if name == 'final' else name}.weight": each for name, each in outside.items()
    }

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x + own.self_attn(own.input_layernorm(x), torch.ones(x.shape[:2], dtype=torch.bool))[0]
        return x + own.mlp(own.post_attention_layernorm(x))

    target = saved(folder, target, files)
    norm = lambda x, weight: rms(x, weight, eps)  # noqa: E731
    return target, _chain(target, [_Layer(outside, run)], norm, states_first=False, hands_on_normed=True)


def qwen(folder: Path) -> tuple[Any, Logits]:
    index = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 4}
    text = {f"indexer_{name}": value for name, value in index.items()} | {"linear_conv_kernel_dim": 4}
    config = _config("qwen4_exp", text)
    target = tiny_model(GENERATING[type(config)], config)
    decoder, text_config, eps = target.get_decoder(), config.text_config, config.text_config.rms_norm_eps
    layer, mixer = copy.deepcopy(decoder.layers[-1]), copy.deepcopy(decoder.hyper_connection_mixer)
    randomise(layer, 0.2)
    randomise(mixer, 0.2, 2)
    size, generator = text_config.hidden_size, torch.Generator().manual_seed(4)
    shapes = {"pre_fc_norm_embedding": (size,), "pre_fc_norm_hidden": (size * text_config.hc_count,)}
    shapes |= {"fc_embedding": (size, size), "fc_hidden": (size, size)}
    own = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    files = _files(folder, target, layer, "mtp.layers.0.") | {f"mtp.{name}.weight": each for name, each in own.items()}
    files |= {f"mtp.hyper_connection_mixer.{name}": each for name, each in mixer.state_dict().items()}

    def logits(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embeds = rms(target.get_input_embeddings()(tokens[1:]), 1 + own["pre_fc_norm_embedding"], eps)
        streams = rms(states, 1 + own["pre_fc_norm_hidden"], eps).unflatten(-1, (-1, size)) @ own["fc_hidden"].T
        x = (streams + (embeds @ own["fc_embedding"].T)[:, None]).flatten(-2)[None]
        rope = decoder.rotary_emb(x, torch.arange(x.shape[1])[None])
        made = mixer(layer(x, rope, attention_mask=causal(x.shape[1])))[:, -1]
        return made @ target.get_output_embeddings().weight.T

    return saved(folder, target, files), logits
