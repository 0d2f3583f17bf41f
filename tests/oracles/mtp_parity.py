"""Parity of layers for multi-token prediction, by their published names, with a formula in plain torch.

A case makes a tiny random target with one or two layers more than it has. Its files are written as published: what
follows the target's layers gets the names of the type's layers for multi-token prediction, with random projections and
norms. The formula runs these decoder layers, which transformers has, as vLLM's class of the type does
(`vllm/model_executor/models/*_mtp.py`, 0.32).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_hsdraft.drafters.base.auto_drafter import AutoDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.methods.mtp.drafter import MtpDrafter
from oracles import mtp_blocks, mtp_caches
from oracles.format_parity import PROMPTS, Parity, texts_of
from oracles.mtp_targets import GENERATING
from oracles.tiny import VOCABULARY, tiny_config, tiny_model

_STD = 0.3
_POINTS = ((0, 12), (12, 13), (13, 17), (17, 29))  # where a text is read on to


class MimoConfig(Qwen2Config):
    """MiMo is Qwen2 with such layers; its own class is code of its repository."""

    model_type = "mimo"


class MimoForCausalLM(Qwen2ForCausalLM):
    config_class = MimoConfig


AutoConfig.register("mimo", MimoConfig, exist_ok=True)
AutoModelForCausalLM.register(MimoConfig, MimoForCausalLM, exist_ok=True)


@dataclass(frozen=True)
class Case:
    """The layers of a model type."""

    name: str
    model_type: str
    stem: str = "model.layers."  # of the target's own layers
    layer: str = "model.layers.{last}."  # beginning of a published name; {last} counts on, {index} from 0
    parts: Mapping[str, str] = field(default_factory=dict)  # published name of each part, beside those of DeepSeek
    inside: Mapping[str, str] = field(default_factory=dict)  # the same within the decoder layer
    count: int = 1
    lists: str = "full"
    padded: bool = False  # whether lists by layer of config.json go on with these layers
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the target's text configuration
    last: Mapping[str, str] = field(default_factory=dict)  # what the last entries of lists by layer are
    states_first: bool = False
    normed: bool = True
    hands_on_normed: bool = True
    own_heads: bool = False
    published: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors
    told: Mapping[str, Any] = field(default_factory=dict)  # in config.json, beside the target's
    apart: bool = False  # whether they are published without the target, as NextN
    in_batches: bool = True  # whether the target is drafted for in batches
    made: Callable[[Path], Any] | None = None  # makes target and formula, where no layer of the target is such a layer


_DEEPSEEK = {
    "enorm": "{layer}enorm",
    "hnorm": "{layer}hnorm",
    "eh_proj": "{layer}eh_proj",
    "norm": "{layer}shared_head.norm",
}
_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
}
_FINAL = {"norm": "{layer}final_layernorm"}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TYPED = {"full_attention": _ROPE, "sliding_attention": {**_ROPE, "rope_theta": 500.0}}
_NEXTN = {"num_nextn_predict_layers": 1}


@dataclass(frozen=True)
class Published:
    """A target, and its layers for multi-token prediction by the formula."""

    target: Any
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of a chain, by tokens `[n + 1]` and states `[n, D]`


@torch.no_grad()
def published(case: Case, folder: Path) -> Published:
    """Writes a target with such layers, and loads it."""
    if case.made is not None:
        return Published(*case.made(folder))
    base = tiny_config(type(AutoConfig.for_model(case.model_type)), case.lists)
    fields = {**base.get_text_config().to_dict(), **case.fields}
    kept = fields["num_hidden_layers"] - case.count
    for name in ("layer_types", "mlp_layer_types"):
        if name in case.last and fields.get(name):
            fields[name] = [*fields[name][:kept], *[case.last[name]] * case.count]
    fewer = {name: each[:kept] for name, each in fields.items() if isinstance(each, list) and len(each) > kept}
    fewer = {} if case.padded else fewer
    fewer |= {"num_hidden_layers": kept, **case.told}
    config = _with(base, fields)
    big = tiny_model(GENERATING.get(type(config)) or MimoForCausalLM, config)
    generator = torch.Generator().manual_seed(4)
    for name, weight in big.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        is_norm = weight.dim() == 1 and "norm" in name
        weight.copy_(weight + 0.1 * values if is_norm else values * (0.1 if weight.dim() == 1 else _STD))
    big.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    small = _with(base, {**fields, **fewer})
    small.architectures = [type(big).__name__]
    small.save_pretrained(folder)
    size, stem = config.get_text_config().hidden_size, case.stem
    own: list[dict[str, torch.Tensor]] = []
    renamed: dict[str, torch.Tensor] = {}
    for index in range(case.count):
        old, layer = f"{stem}{kept + index}.", case.layer.format(last=kept + index, index=index)
        for name in [name for name in tensors if name.startswith(old)]:
            rest = name.removeprefix(old)
            for ours, theirs in case.inside.items():
                rest = rest.replace(ours, theirs)
            renamed[layer + rest] = tensors.pop(name)
        shapes = {"enorm": (size,), "hnorm": (size,), "eh_proj": (size, 2 * size), "norm": (size,)}
        shapes |= {"head": (VOCABULARY, size)} if case.own_heads else {}
        parts = {
            name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else _STD) + (len(shape) == 1)
            for name, shape in shapes.items()
        }
        own.append(parts)
        for name, tensor in parts.items():
            if name != "norm" or case.normed:
                renamed[{**_DEEPSEEK, **case.parts}[name].format(layer=layer) + ".weight"] = tensor
    save_file({**tensors, **case.published(renamed)}, folder / "model.safetensors", metadata={"format": "pt"})
    target = type(big).from_pretrained(folder, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    return Published(target, partial(_chain, case, big, kept, own))


def _with(config: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a configuration with other fields of its text."""
    left_out = ("model_type", "dtype", "transformers_version", "_name_or_path")
    fields = {name: value for name, value in fields.items() if name not in left_out}
    if config.get_text_config() is config:
        return type(config)(**fields)
    outer = {name: value for name, value in config.to_dict().items() if name not in left_out}
    text = {**fields, "model_type": config.get_text_config().model_type}
    return type(config)(**{**outer, "text_config": text})


def _chain(
    case: Case, big: Any, kept: int, own: list[dict[str, torch.Tensor]], tokens: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Logits `[count, V]` of a chain of one token a layer, after tokens `[n + 1]` and states `[n, D]` before them."""
    decoder, found = big.get_decoder(), []
    ids, states, at = tokens[None, 1:], states[None], torch.arange(1, len(tokens))[None]
    norm_of = type(next(module for name, module in decoder.layers[-1].named_modules() if "norm" in name))
    for index, parts in enumerate(own):

        def norm(name: str, values: torch.Tensor, parts: dict[str, torch.Tensor] = parts) -> torch.Tensor:
            made = norm_of(values.shape[-1], eps=big.config.get_text_config().rms_norm_eps)
            made.weight.copy_(parts[name])
            return made(values)

        pair = [norm("enorm", big.get_input_embeddings()(ids)), norm("hnorm", states)]
        x = torch.cat(pair[::-1] if case.states_first else pair, dim=-1) @ parts["eh_proj"].T
        layer = decoder.layers[kept + index]
        kinds = getattr(big.config.get_text_config(), "layer_types", None) or ["full_attention"] * 9
        kind = kinds[kept + index]
        typed = {"layer_type": kind} if kind != "indexed_attention" and _by_type(decoder.rotary_emb) else {}
        places = torch.arange(ids.shape[1])
        near = places[:, None] - places
        seen = near >= 0
        if kind == "sliding_attention":
            seen &= near < big.config.get_text_config().sliding_window
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        axes = "mrope_section" in (big.config.get_text_config().rope_parameters or {})
        rope = decoder.rotary_emb(x, position_ids=at.expand(3, -1, -1) if axes else at, **typed)
        y = layer(x, attention_mask=mask, position_embeddings=rope, position_ids=at)
        y = y[0] if isinstance(y, tuple) else y
        normed = norm("norm", y) if case.normed else y
        states = normed if case.hands_on_normed else y
        head = parts["head"] if case.own_heads else big.get_output_embeddings().weight
        logits = normed[0, -1] @ head.T
        found.append(logits)
        ids = torch.cat([ids[:, 1:], logits.argmax()[None, None]], dim=1)
        at = at + 1
    return torch.stack(found)


def _alone(folder: Path, target: Any) -> MtpDrafter:
    """Returns the drafter of files that hold the layer of a target's files alone, counted from 0."""
    last = f".layers.{target.config.num_hidden_layers}."
    tensors = load_file(folder / "model.safetensors")
    alone = {name.replace(last, ".layers.0."): each for name, each in tensors.items() if last in name}
    place = folder / "alone"
    place.mkdir()
    save_file(alone, place / "model.safetensors", metadata={"format": "pt"})
    document = {**target.config.to_dict(), "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    (place / "config.json").write_text(json.dumps(document))
    return AutoDrafter.from_pretrained(place).of_target(target)


def _by_type(rotary: Any) -> bool:
    return (
        "layer_type" in rotary.forward.__wrapped__.__code__.co_varnames
        if hasattr(rotary.forward, "__wrapped__")
        else False
    )


CASES = (
    Case("DeepSeek-V3 layers, of other depth", "deepseek_v3", told=_NEXTN),
    Case("NextN, DeepSeek-V3 layers alone", "deepseek_v3", told=_NEXTN, apart=True),
    Case("GLM-4.5 layers", "glm4_moe", told=_NEXTN),
    *(Case(f"GLM-4.5 layers, two, each reads the one before {'after' if normed else 'before'} its norm", "glm4_moe",
           count=2, hands_on_normed=normed, told={"num_nextn_predict_layers": 2}) for normed in (True, False)),
    Case("GLM-4.7-Flash layers", "glm4_moe_lite", told=_NEXTN),
    Case("DeepSeek-V3.2 layers", "deepseek_v32", lists="anew", told=_NEXTN),
    Case("GLM-5 layers", "glm_moe_dsa", lists="anew", told=_NEXTN),
    Case("HY-V3 layers", "hy_v3", parts=_FINAL, told=_NEXTN),
    Case("Ling 2.5 layers", "bailing_hybrid", parts=_FINAL, told=_NEXTN),
    Case("Qwen3-Next layers", "qwen3_next", layer="mtp.layers.{index}.", parts=_QWEN),
    Case("Qwen3.5 layers", "qwen3_5_text", layer="mtp.layers.{index}.", parts=_QWEN),
    Case("Qwen3.5-MoE layers", "qwen3_5_moe_text", layer="mtp.layers.{index}.", parts=_QWEN),
    Case("Qwen3.5 layers, multimodal", "qwen3_5", "model.language_model.layers.", "mtp.layers.{index}.", _QWEN),
    Case("LongCat-Flash layers", "longcat_flash", made=mtp_blocks.longcat),
    Case("HY-V4 layers", "hy_v4", made=mtp_blocks.hunyuan),
    Case("Dots 3 Note layers", "dots3_note_text", made=mtp_blocks.dots),
    Case("Nemotron-H layers", "nemotron_h", made=mtp_blocks.nemotron),
    Case("Inkling layers, two, the second with a window", "inkling_mm_model", count=2, made=mtp_caches.inkling),
    Case("MiniMax-M3 layers", "minimax_m3_vl", hands_on_normed=False, in_batches=False,
         made=mtp_caches.minimax),
    Case("Qwen4-Exp layers", "qwen4_exp", hands_on_normed=False, made=mtp_caches.qwen),
    Case("GLM-5.3-Flash layers", "glm5_next", made=mtp_caches.glm),
    Case("EXAONE-MoE layers", "exaone_moe", layer="mtp.layers.{index}.", parts=_QWEN, told=_NEXTN,
         last={"mlp_layer_types": "dense"}),
    Case("ERNIE 4.5 layers", "ernie4_5_moe", layer="model.mtp_block.{index}.", parts={
        "enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0", "eh_proj": "model.mtp_linear_proj.0",
    }, fields={"moe_layer_end_index": 2}, normed=False, told=_NEXTN),
    Case("MiMo layers", "mimo", layer="model.mtp_layers.{index}.", parts={
        "enorm": "{layer}token_layernorm", "hnorm": "{layer}hidden_layernorm", "eh_proj": "{layer}input_proj", **_FINAL,
    }, states_first=True, told=_NEXTN),
    Case("MiMo-V2 layers", "mimo_v2_flash", layer="model.mtp.layers.{index}.", parts=_FINAL,
         inside={"post_attention_layernorm": "pre_mlp_layernorm"}, lists="anew",
         last={"layer_types": "sliding_attention", "mlp_layer_types": "dense"}),
    Case("Step-3.7 layers", "step3p7", count=2, padded=True, hands_on_normed=False, own_heads=True,
         parts={"norm": "{layer}transformer.shared_head.norm", "head": "{layer}transformer.shared_head.output"},
         last={"mlp_layer_types": "dense"}, told={"num_nextn_predict_layers": 2}, fields={
             "layer_types": ["full_attention", *["sliding_attention"] * 3],
             "rope_parameters": _TYPED, "sliding_window": 8,
         }),
    Case("Qwen3.5-MoE layers, multimodal", "qwen3_5_moe", "model.language_model.layers.", "mtp.layers.{index}.", _QWEN),
    Case("EXAONE 4.5 layers", "exaone4_5", "model.language_model.layers.", "mtp.layers.{index}.", _QWEN),
    Case("GLM-OCR layers", "glm_ocr", "model.language_model.layers.", "model.language_model.layers.{last}.",
         told=_NEXTN, fields={"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}),
)  # fmt: skip


@torch.no_grad()
def states_of(target: Any, ids: torch.Tensor, normed: bool = True) -> torch.Tensor:
    """Returns the last layer's states of a text, after the final norm or before the mixer of several streams."""
    if normed:
        return target(ids[None], output_hidden_states=True).hidden_states[-1][0]
    given: list[torch.Tensor] = []
    mixer = target.get_decoder().hyper_connection_mixer
    hook = mixer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    target(ids[None])
    hook.remove()
    return given[0][0]


@torch.no_grad()
def parity(case: Case) -> Parity:
    """Compares the drafts of a text that is read in pieces with the formula's; decodes a padded batch."""
    with tempfile.TemporaryDirectory() as folder:
        made = published(case, Path(folder))
        drafter = (
            _alone(Path(folder), made.target)
            if case.apart
            else MtpDrafter.for_target(made.target, hands_on_normed=case.hands_on_normed)
        )
    drafter.generation_config.num_assistant_tokens = case.count
    ids = torch.randint(2, VOCABULARY, (30,), generator=torch.Generator().manual_seed(0))
    states = states_of(made.target, ids, drafter.config.last_tap_is_normed)
    session, worst = drafter.session(Call(made.target, 1, DraftOptions.of(drafter))), 0.0
    for begin, end in _POINTS:
        at = torch.arange(begin, end)
        session.observe([Accepted(0, [int(ids[end])], states[begin:end], at, ids[begin + 1 : end + 1])])
        ask = Ask(0, int(ids[end]), case.count, case.count, 1)
        expansion = session.expansion([ask], case.count, session.options_for(ask))
        token, numbers, found = ids[None, end : end + 1], None, []
        for level in range(1, case.count + 1):
            scores, numbers = expansion.levels(level, token, numbers)
            found.append(scores[0, 0])
            token = scores.argmax(-1)
        wanted = made.logits(ids[: end + 1], states[:end])
        worst = max(worst, float((torch.stack(found) - wanted).abs().max()))
    _, statistics = texts_of(made.target, drafter, prompts=PROMPTS if case.in_batches else PROMPTS[1:])
    accepted = sum(length > 0 for length in statistics.accepted_lengths)
    rounds = len(statistics.accepted_lengths)
    return Parity(case.name, "the formula of vLLM's class", worst, rounds, accepted, rounds - accepted)
