"""EAGLE drafters in plain torch, for layouts whose readers do not run on a CPU: vLLM 0.32, SGLang 0.5.23, SafeAILab.

Written from vLLM's `llama_eagle3.py`, `llama_eagle.py`, `deepseek_eagle3.py`, SGLang's `llama_eagle3.py`, SafeAILab's
`cnets1.py` and ModelOpt's `modeling_eagle.py`: one row at a time, each layer's keys and values in a list. Attention of
DeepSeek is that of transformers. Each case is a line of `CASES`: fields of config.json, what the network has, and what
files are called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from oracles.format_parity import HIDDEN, SIZES, Case, Reference, write
from oracles.quantised_weights import CASES as WEIGHTS
from oracles.quantised_weights import GENERATOR

TOKENS, LAYERS = 64, 8
DRAFTED = tuple(range(1, TOKENS, 2))  # a part of the vocabulary
OF_AUTHORS = (2, LAYERS // 2, LAYERS - 3)
HEADS, GROUPS, WIDTH, INNER = 4, 2, 8, 48
State = dict[str, torch.Tensor]
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
}  # fmt: skip


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: torch.Tensor, position: int, rotated: int, theta: float) -> torch.Tensor:
    """Rotates the first `rotated` numbers of each head, pairing its halves."""
    angles = position / theta ** (torch.arange(0, rotated, 2) / rotated)
    low, high, rest = x[:, : rotated // 2], x[:, rotated // 2 : rotated], x[:, rotated:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


class Network:
    """An EAGLE drafter of random weights, by our names."""

    def __init__(
        self,
        older: bool = False,  # EAGLE-1
        taps: int = 3,
        layers: int = 1,
        drafted: int = len(DRAFTED),
        vocabulary: int = TOKENS,
        head: bool = True,  # of its own
        embedding: bool = False,  # of its own
        fc: bool = True,
        tap_norms: bool = False,
        biases: Sequence[str] = (),  # beginnings or ends of modules that have one
        all_read: bool = False,  # embeddings, in each layer
        twice: bool = False,  # whether states are normed as embeddings are, and then by their own norm
        rotated: int = WIDTH,
        theta: float = 10000.0,
        scale: float = 1.0,
        inner: int = INNER,
        window: int | None = None,  # positions that a layer attends to, the own one included
        act: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        latent: dict[str, Any] | None = None,  # fields of `DeepseekV3Config`
    ) -> None:
        self.older, self.layers, self.all_read, self.scale, self.twice = older, layers, all_read, scale, twice
        self.rotated, self.theta, self.latent, self.window, self.act = rotated, theta, latent, window, act
        products: dict[str, tuple[int, int]] = {}
        norms: dict[str, int] = {} if older else {"norm": HIDDEN}
        if fc:
            products["fc"] = (HIDDEN, 2 * HIDDEN if older else taps * HIDDEN)
        if head:
            products["lm_head"] = (drafted, HIDDEN)
        if tap_norms:
            norms |= {f"fc_norm.{index}": HIDDEN for index in range(taps)}
        for index in range(layers):
            place, reads = f"layers.{index}.", not older and (index == 0 or all_read)
            size = 2 * HIDDEN if reads else HIDDEN
            norms |= {f"{place}post_attention_layernorm": HIDDEN}
            norms |= {} if older and index == 0 else {f"{place}input_layernorm": HIDDEN}
            norms |= {f"{place}hidden_norm": HIDDEN} if reads else {}
            own = {"q_proj": HEADS, "k_proj": GROUPS, "v_proj": GROUPS} if latent is None else {}
            products |= {f"{place}self_attn.{name}": (heads * WIDTH, size) for name, heads in own.items()}
            products |= {f"{place}self_attn.o_proj": (HIDDEN, HEADS * WIDTH)} if latent is None else {}
            products |= {f"{place}mlp.{name}_proj": (inner, HIDDEN) for name in ("gate", "up")}
            products[f"{place}mlp.down_proj"] = (HIDDEN, inner)
        generator = torch.Generator().manual_seed(4)

        def drawn(*shape: int, around: float = 0.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * (0.1 if older else 0.2) + around  # states are not normed

        self.state: State = {f"{name}.weight": drawn(*shape) for name, shape in products.items()}
        self.state |= {f"{name}.weight": drawn(size, around=1.0) for name, size in norms.items()}
        for name, shape in products.items():
            if any(name.startswith(each) or name.endswith(each) for each in biases):
                self.state[f"{name}.bias"] = drawn(shape[0])
        if embedding:
            self.state["embed_tokens.weight"] = drawn(vocabulary, HIDDEN)
        if latent is not None:
            self._attention, self._rotary = [], DeepseekV3RotaryEmbedding(_latent_config(latent))
            for index in range(layers):
                module = _latent_attention(latent, 2 * HIDDEN if index == 0 else HIDDEN)
                for name, parameter in module.named_parameters():
                    values = drawn(*parameter.shape, around=1.0 if "layernorm" in name else 0.0)
                    self.state[f"layers.{index}.self_attn.{name}"] = parameter.data = values
                self._attention.append(module)

    def by(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.state[f"{name}.weight"])

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        if self.older or "fc.weight" not in self.state:
            return taps
        if "fc_norm.0.weight" in self.state:
            parts = taps.split(HIDDEN, dim=-1)
            taps = torch.cat([self.normed(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=-1)
        return self.by("fc", taps)

    def attended(self, index: int, x: torch.Tensor, position: int, seen: list[Any]) -> torch.Tensor:
        if self.latent is not None:
            seen.append(x)
            rope = self._rotary(x, torch.arange(len(seen))[None])
            mask = torch.full((len(seen), len(seen)), -math.inf).triu(1)[None, None]
            return self._attention[index](torch.stack(seen)[None], rope, mask)[0][0, -1]
        place = f"layers.{index}.self_attn."
        query, key, value = (self.by(f"{place}{name}_proj", x).view(-1, WIDTH) for name in "qkv")
        seen.append((turned(key, position, self.rotated, self.theta), value))
        query = turned(query, position, self.rotated, self.theta)
        mixed, near = [], seen if self.window is None else seen[-self.window :]
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = torch.stack([key[group] @ query[head] for key, _ in near]) / WIDTH**0.5
            mixed.append(scores.softmax(dim=0) @ torch.stack([value[group] for _, value in near]))
        return self.by(f"{place}o_proj", torch.cat(mixed))

    def row(self, x: torch.Tensor, embedded: torch.Tensor, position: int, seen: list[list[Any]]) -> torch.Tensor:
        if self.older:
            x = self.by("fc", torch.cat([embedded, x]))
        for index in range(self.layers):
            place = f"layers.{index}."
            if not self.older and (index == 0 or self.all_read):
                state = self.normed(f"{place}input_layernorm", x) if self.twice else x
                parts = self.normed(f"{place}input_layernorm", embedded), self.normed(f"{place}hidden_norm", state)
                inputs = torch.cat(parts)
            else:
                inputs = x if self.older and index == 0 else self.normed(f"{place}input_layernorm", x)
            x = x + self.attended(index, inputs, position, seen[index])
            inner = self.normed(f"{place}post_attention_layernorm", x)
            gate = self.act(self.by(f"{place}mlp.gate_proj", inner))
            x = x + self.by(f"{place}mlp.down_proj", gate * self.by(f"{place}mlp.up_proj", inner))
        return x

    def logits(
        self, table: torch.Tensor, head: torch.Tensor, taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]
    ) -> torch.Tensor:
        """Returns the logits of a path, see `eagle_parity.parity_of`; `table` and `head` are those in use."""
        seen: list[list[Any]] = [[] for _ in range(self.layers)]
        sources, found = list(self.fused(taps)), []
        for position, token in enumerate([*tokens, *path]):
            y = self.row(sources[position], table[token], position, seen)
            if position >= len(tokens) - 1:
                sources.append(y)
                normed = y if self.older else self.normed("norm", y)
                found.append(F.linear(normed, head) * self.scale)
        return torch.stack(found)


def _latent_config(latent: dict[str, Any]) -> DeepseekV3Config:
    config = DeepseekV3Config(hidden_size=HIDDEN, max_position_embeddings=256, **latent)
    config._attn_implementation = "eager"
    return config


def _latent_attention(latent: dict[str, Any], size: int) -> Any:
    """DeepSeek's attention of an input of another width."""
    module = DeepseekV3Attention(_latent_config(latent), 0).eval()
    names = ["kv_a_proj_with_mqa", "q_proj" if module.q_lora_rank is None else "q_a_proj"]
    for name in names:
        setattr(module, name, torch.nn.Linear(size, getattr(module, name).out_features, bias=False))
    return module


def by_hand(
    target: Any,
    config: dict[str, Any] | None = None,
    names: Callable[[str], str] = lambda name: name.replace("layers.0.", "midlayer."),  # of tensors in the files
    further: State | None = None,  # tensors that no reader uses
    taps: Sequence[int] | None = None,  # those that the reference reads; by default the authors'
    ids: Sequence[int] | None = DRAFTED,  # tokens that can be drafted; None for all
    maps: bool = True,  # whether d2t is in the files
    beside: dict[str, Any] | None = None,  # further files
    pickled: bool = False,
    nested: str = "",  # table of config.json that has the fields of layers
    layer: dict[str, Any] | None = None,  # further ones of these
    quantised: str = "",  # how a weight is, see `quantised_weights`
    dtype: torch.dtype = torch.float32,  # of the files
    sharded: bool = False,
    given: dict[str, Any] | None = None,  # arguments of loading
    **network: Any,
) -> Reference:
    """Returns a drafter as `Network` computes it, in files of the names and fields of a project."""
    older = network.get("older", False)
    drafted = TOKENS if ids is None else len(ids)
    made = Network(**{"drafted": drafted, "taps": 3 if taps is None else len(taps), **network})
    made.state = {name: each.to(dtype).float() for name, each in made.state.items()}
    if quantised:
        GENERATOR.manual_seed(1)
        own, parts, right = WEIGHTS[quantised]()
        config, made.state[f"{_PACKED}.weight"] = {**(config or {}), **own}, right.float()
    table = made.state.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    rows = target.get_output_embeddings().weight.detach()
    head = made.state.get("lm_head.weight", rows if ids is None else rows[list(ids)])[: TOKENS if ids is None else None]
    known = {
        **SIZES,
        "vocab_size": TOKENS,
        "num_hidden_layers": made.layers,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    if not older:
        known |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafted}
    document = {"model_type": "llama", "max_position_embeddings": 2048, **known, **(config or {})}
    if nested:
        document = {nested: known | {"model_type": "llama", **(layer or {})}, **(config or {})}
    tensors = {names(name): tensor.to(dtype) for name, tensor in made.state.items()} | (further or {})
    if quantised:
        tensors.pop(names(f"{_PACKED}.weight"))
        ends = {part: f".weight{part}" if part.startswith("_") or not part else f".{part}" for part in parts}
        tensors |= {names(_PACKED + ends[part]): each for part, each in parts.items()}
    if ids is not None and maps:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))

    def save(folder: Path) -> None:
        write(folder, {name: value for name, value in document.items() if value is not ...}, tensors)
        if pickled or sharded:
            (folder / "model.safetensors").unlink()
        if pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        if sharded:
            files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
            placed = {name: files[index % 2] for index, name in enumerate(tensors)}
            for file in files:
                save_file({name: each.clone() for name, each in tensors.items() if placed[name] == file}, folder / file)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        for name, content in (beside or {}).items():
            torch.save(content, folder / name)

    read = ((LAYERS,) if older else OF_AUTHORS) if taps is None else taps
    return Reference("plain torch", save, partial(made.logits, table, head), read, given=given or {})


def _as_is(name: str) -> str:
    return name


_PACKED = "layers.0.mlp.down_proj"  # a weight of the shape of those in `quantised_weights`
_IDS = "eagle_aux_hidden_state_layer_ids"
_LEGACY = {f"fc_norm.{index}.": f"aux_norm_{name}." for index, name in enumerate(("low", "mid", "high"))}
_COPIED = dict.fromkeys((
    "use_aux_hidden_state", "is_decoder", "attn_output_gate", "output_router_logits", "has_lm_head", "use_mrope",
    "output_attentions", "output_hidden_states", "norm_topk_prob", "use_bfloat16", "torchscript", "add_cross_attention",
    "return_dict_in_generate", "output_scores", "moe_router_enable_expert_bias", "tie_encoder_decoder", "use_qk_norm",
    "seq_aux", "unsloth_fixed", "use_rmsnorm", "mtp_use_dedicated_embeddings", "add_bos_token",
), True)  # fmt: skip
_PADDED = {"vocab_size": TOKENS + 6}
_WHOLE = {"ids": None, "maps": False}
_OLDER = {"older": True, "names": _as_is, "head": False, **_WHOLE}
_FREQUENT = (7, 3, 9, 40, 41, 42, 11, 5, 60, 61, 8, 62, 20, 21, 2, 33)
_MLA = {**LATENT, "model_type": "kimi_k2", "head_dim": ..., "tie_word_embeddings": False}
_OF_OPTIMIZER = {  # ModelOpt's `hf_spec_configs.py`
    _IDS: [], "next_layer_regular": True, "use_aux_hidden_state": True, "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
_DEEP_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 50.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0,
}  # fmt: skip


def _legacy(name: str) -> str:
    for ours, theirs in _LEGACY.items():
        name = name.replace(ours, theirs)
    return name.replace("layers.0.", "midlayer.")


def _of_speculators(name: str) -> str:
    return name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")


def _inner(name: str) -> str:
    return f"model.{name}" if name.startswith("layers.") else name


CASES = tuple(
    Case(name, partial(by_hand, **fields))
    for name, fields in {
        "SGLang, legacy norms of hidden states": {
            "config": {"use_aux_norm": True}, "names": _legacy, "tap_norms": True},
        "SGLang, legacy norms, not told": {"names": _legacy, "tap_norms": True},
        "SGLang, output rows of the target": {"config": {"draft_vocab_size": None}, "head": False, **_WHOLE},
        "vLLM, output rows of the target": {"config": {"draft_vocab_size": TOKENS}, "head": False, **_WHOLE},
        "vLLM, unused tensors": {"names": _as_is, "layers": 2, "further": {
            "layers.1.hidden_norm.weight": torch.ones(HIDDEN),
            "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(WIDTH // 2)}},
        "SGLang, Llama 4's inner width": {
            "config": {"model_type": "llama4_text", "intermediate_size": 24, "intermediate_size_mlp": INNER,
                       "attn_temperature_tuning": True}},
        "vLLM, rotated in part": {
            "config": {"partial_rotary_factor": 0.5, "rope_theta": 50.0}, "rotated": 4, "theta": 50.0},
        "vLLM, rotated in part by another name": {
            "config": {"rotary_pct": 0.25, "rope_theta": 50.0}, "rotated": 2, "theta": 50.0},
        "vLLM, rotated in part by rope_parameters": {
            "config": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
            "rotated": 4, "theta": 50.0},
        "vLLM, rotated in part by rope_dim": {
            "config": {"rope_parameters": {"rope_type": "default", "rope_dim": 4, "partial_rotary_factor": 0.25},
                       "rotary_emb_base": 50.0}, "rotated": 4, "theta": 50.0},
        "vLLM, descending hidden states": {"config": {_IDS: [6, 4, 1]}, "taps": (1, 4, 6)},
        "SGLang, descending hidden states": {"config": {"eagle_config": {_IDS: [5, 3, 0]}}, "taps": (1, 4, 6)},
        "vLLM, padded vocabulary": {"config": _PADDED},
        "vLLM, padded vocabulary, own embedding": {
            "config": _PADDED, "embedding": True, "vocabulary": TOKENS + 6},
        "vLLM, padded vocabulary, whole": {
            "config": {**_PADDED, "draft_vocab_size": TOKENS + 6}, **_WHOLE, "drafted": TOKENS + 6},
        "vLLM, no fc": {
            "config": {"eagle_config": {"use_aux_hidden_state": False}}, "fc": False, "taps": (LAYERS,)},
        "SGLang, bias of fc": {"config": {"bias": True}, "biases": ["fc"]},
        "vLLM, biases of the feed-forward block": {
            "config": {"mlp_bias": True}, "biases": ["gate_proj", "up_proj", "down_proj"]},
        "vLLM, biases of queries, keys and values": {
            "config": {"attention_bias": True}, "biases": ["q_proj", "k_proj", "v_proj"]},
        "SpecForge, types of the target's layers": {
            "config": {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 4}},
        "vLLM, factor of logits": {"config": {"logit_scale": 0.0625}, "scale": 0.0625},
        "copied switches": {"config": _COPIED},
        "DeepSpec, two layers that read embeddings": {
            "names": _as_is, "layers": 2, "all_read": True, "embedding": True, **_WHOLE, "taps": (1, 4, 6),
            "config": {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 3, 5],
                       "draft_vocab_size": TOKENS}},
        "vLLM, DeepSeek's attention (MLA)": {
            "names": _as_is, "latent": LATENT, "config": {**_MLA, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}},
        "vLLM, Kimi K2's attention: YaRN": {
            "names": _as_is, "layers": 2, "latent": {**LATENT, "q_lora_rank": None, "rope_parameters": _DEEP_YARN},
            "config": {**_MLA, "q_lora_rank": None, "head_dim": 4, "seq_aux": True, "rope_theta": 50.0,
                       "rope_scaling": {**_DEEP_YARN, "rope_type": "deepseek_yarn"}}},
        "whole vocabulary, no maps": {"config": {"draft_vocab_size": TOKENS}, **_WHOLE},
        "whole vocabulary, map of zeros": {
            "config": {"draft_vocab_size": TOKENS}, **_WHOLE, "further": {"d2t": torch.zeros(TOKENS).long()}},
        "map in int32": {
            "maps": False, "further": {"d2t": (torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))).int()}},
        "sharded files": {"sharded": True},
        "midlayer and two more layers": {"layers": 3},
        "ModelOpt, two layers": {
            "names": _as_is, "layers": 2, "config": {"eagle_config": _OF_OPTIMIZER}},
        "ModelOpt, a state that is normed twice": {
            "names": _as_is, "config": {"eagle_config": _OF_OPTIMIZER}, "twice": True,
            "given": {"norms_state_twice": True}},
        "type qwen2 (QwQ), biases, unused window": {
            "config": {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False},
            "biases": ["q_proj", "k_proj", "v_proj"]},
        "type phi3 (Phi-4)": {"config": {"model_type": "phi3"}},
        "one hidden state": {"taps": (6,), "config": {_IDS: [6], "num_aux_hidden_states": 1}},
        "head_dim null": {"config": {"head_dim": None}},
        "NeMo AutoModel, GELU of Gemma": {
            "config": {"hidden_act": "gelu_pytorch_tanh"}, "act": partial(F.gelu, approximate="tanh")},
        "full attention told, and a window": {
            "config": {"layer_types": ["full_attention"], "sliding_window": 4}},
        "vLLM, sliding window": {
            "config": {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": True},
            "window": 9},
        "files in bfloat16, quantisation of the target": {
            "dtype": torch.bfloat16, "config": {"dtype": "bfloat16", "quantization_config": {
                "quant_method": "fp8", "ignored_layers": ["midlayer", "fc", "lm_head"]}}},
        "files in float16, pickled": {"dtype": torch.float16, "pickled": True},
        **{f"quantised, {name}": {"quantised": name} for name in WEIGHTS},
        "EAGLE-1, bias": {**_OLDER, "biases": ["fc"], "embedding": True, "pickled": True},
        "EAGLE-1, no bias": {**_OLDER, "config": {"bias": False, "rope_theta": 50.0}, "theta": 50.0},
        "EAGLE-2, biases of Qwen2": {
            **_OLDER, "config": {"qkv_bias": True, "bias": True}, "biases": ["fc", "q_proj", "k_proj", "v_proj"]},
        "EAGLE-1, two layers": {**_OLDER, "layers": 2},
        "EAGLE-1, SGLang and vLLM: tensors that are not used": {
            **_OLDER, "further": {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}},
        "EAGLE-1, own head": {**_OLDER, "head": True},
        "EAGLE-1, padded vocabulary": {**_OLDER, "config": _PADDED, "embedding": True, "vocabulary": TOKENS + 6},
        "HASS": {**_OLDER, "config": {"architectures": ["LlamaForCausalLM"], "bias": True}, "biases": ["fc"],
                 "embedding": True},
        "FR-Spec": {**_OLDER, "ids": _FREQUENT, "beside": {"freq_16.pt": list(_FREQUENT)}, "pickled": True},
        "vLLM EAGLE-1, nested": {
            **_OLDER, "names": _inner, "nested": "model",
            "config": {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}},
        "vLLM EAGLE-1, frequent tokens": {
            **_OLDER, "names": _inner, "nested": "model", "ids": _FREQUENT, "head": True,
            "further": {"token_map": torch.tensor(_FREQUENT)},
            "config": {"model_type": "eagle", "architectures": ["EAGLEModel"], "truncated_vocab_size": len(_FREQUENT),
                       "vocab_size": TOKENS}},
        "speculators eagle3, output rows of the target": {
            "names": _as_is, "nested": "transformer_layer_config", "head": False, **_WHOLE, "taps": (1, 4, 6),
            "config": {"speculators_model_type": "eagle3", "draft_vocab_size": TOKENS, _IDS: [1, 4, 6]}},
        "speculators eagle3, rotated in part": {
            "names": _as_is, "nested": "transformer_layer_config", "rotated": 4, "taps": (1, 4, 6),
            "layer": {"rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
            "config": {"speculators_model_type": "eagle3", "draft_vocab_size": len(DRAFTED), _IDS: [1, 4, 6]}},
        "speculators eagle": {
            **_OLDER, "names": _of_speculators, "nested": "transformer_layer_config",
            "config": {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], "fusion_bias": False}},
        "speculators eagle, bias": {
            **_OLDER, "names": _of_speculators, "nested": "transformer_layer_config", "biases": ["fc"],
            "config": {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True}},
    }.items()
)  # fmt: skip

# What changes the drafts and is not computed here, and what no drafter of its own is; with a part of the message.
_REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("EAGLE-3, parallel residual", "use_parallel_residual=true", {"config": {"use_parallel_residual": True}}),
    ("EAGLE-3, Mamba", "mamba_enabled=true", {"config": {"mamba_enabled": True}}),
    ("EAGLE-3, an unknown switch in eagle_config", "eagle_config has embed_norm=true", {
        "config": {"eagle_config": {"embed_norm": True}}}),
    ("EAGLE-3, an unknown number in eagle_config", "eagle_config has residual_scale=0.5", {
        "config": {"eagle_config": {"residual_scale": 0.5}}}),
    ("EAGLE-3, not causal", "is_causal=False in config.json is invalid", {"config": {"is_causal": False}}),
    ("EAGLE-3, pairs of neighbours", "is_neox_style=False", {"config": {"is_neox_style": False}}),
    ("EAGLE-3, scaled values", "attention_value_scale=0.5", {"config": {"attention_value_scale": 0.5}}),
    ("EAGLE-3, vocabulary of another target", "the target has vocab_size=64, the drafter expects 4096", {
        "config": {"vocab_size": 4096}, "embedding": True, "vocabulary": 4096}),
    ("EAGLE-3, hidden state named twice", "layer_ids=\\[1, 1, 4\\].*each once", {"config": {_IDS: [1, 4, 1]}}),
    ("EAGLE-3, a part of the rows is missing", r"missing: lm_head\.weight", {"head": False}),
    ("MLA, pairs of halves", "rope_interleave=False", {
        "names": _as_is, "latent": LATENT, "config": {**_MLA, "rope_interleave": False}}),
    ("EAGLE-4", "is an EAGLE-4 drafter, whose licence", {"config": {"architectures": ["LlamaForCausalLMEagle4"]}}),
    ("vLLM EAGLE-1, norms of the inputs", "add_para_norm=true", {**_OLDER, "config": {"add_para_norm": True}}),
    ("vLLM EAGLE-1, norms of DeepSeek's", "is EAGLE-1 with norms of the inputs of fc .*hnorm", {
        **_OLDER, "further": {"enorm.weight": torch.ones(HIDDEN), "hnorm.weight": torch.ones(HIDDEN)}}),
    ("EAGLE-1, DeepSeek's attention (MLA)", "is EAGLE-1 with multi-head latent attention .*kv_a_proj", {
        **_OLDER, "latent": LATENT, "config": _MLA}),
    ("speculators eagle, norms", "layernorms=True", {
        **_OLDER, "names": _of_speculators, "nested": "transformer_layer_config",
        "config": {"speculators_model_type": "eagle", "layernorms": True}}),
    ("heads of a target", "holds a target's own prediction heads .*mtp.0.eh_proj", {
        "names": _as_is, "older": True, "further": {"mtp.0.eh_proj.weight": torch.ones(2, 4)}}),
)  # fmt: skip
REFUSED = tuple(Case(name, partial(by_hand, **fields)) for name, _, fields in _REFUSED)
REASONS = {name: message for name, message, _ in _REFUSED}
