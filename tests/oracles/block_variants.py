"""Variants of z-lab's DFlash layout whose authors' code needs a GPU, beside the same computation in plain torch.

Each row changes the files of a small drafter, and says what vLLM 0.32 (`qwen3_dflash.py`, `qwen3_dspark.py`), SGLang
0.5.23 (`dflash.py`, `dspark_config.py`) or ModelOpt (`hf_spec_export.py`) computes from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from oracles.block_parity import MASK, SCALING, SLOTS, TAPS, BlockReference, parity
from oracles.format_parity import HIDDEN, SIZES, VOCABULARY, Case, write

HEADS, KEYS, SIZE, INNER, EPS, THETA = 4, 2, SIZES["head_dim"], SIZES["intermediate_size"], 1e-6, 7000.0
Tensors = dict[str, torch.Tensor]
__all__ = ["CASES", "parity"]


@dataclass(frozen=True)
class Variant:
    """What a drafter computes, and how its files say so."""

    top: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json
    own: Mapping[str, Any] = field(default_factory=dict)  # fields of its dflash_config
    without: Sequence[str] = ()  # fields that are left out, of either
    renamed: Mapping[str, str] = field(default_factory=dict)  # beginnings of tensors' names in the files
    left_out: Sequence[str] = ()  # beginnings of names of tensors that files do not have
    sights: Sequence[tuple[int | None, bool]] = ((None, False), (None, False))  # window and causality of each layer
    value_scale: float = 1.0
    sinks: bool = False
    neighbours: bool = False  # rotary pairs are neighbours
    gemma: bool = False  # norms multiply by 1 + weight
    rotated: int = SIZE  # dimensions of a head
    embedding: int = 0  # rows of an embedding of its own
    head: int = 0  # rows of an output layer of its own
    drafted: Sequence[int] | None = None  # tokens of these rows, by d2t
    scale: float = 1.0  # of all logits
    cap: float = 0.0  # of all logits, after the factor; 0 for none
    biases: bool = False  # of attention
    markov: str = ""  # type of the head that reads the token before
    markov_size: int = VOCABULARY  # rows of that head
    markov_rows: int = 0  # of its last product, if fewer
    confidence: bool = False
    mask: int = MASK
    mask_row: Any = None  # what is saved as `mask_embedding.pt`, made of the row `[D]`
    embed_scale: float | None = None  # factor of the target's rows; None for embeddings as the target makes them
    given: Mapping[str, Any] = field(default_factory=dict)  # arguments of from_pretrained
    taps: Sequence[int] = TAPS


def tensors_of(variant: Variant) -> Tensors:
    """Returns random weights by z-lab's names."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int, centre: float = 0.0, std: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std + centre

    centre = 0.0 if variant.gemma else 1.0
    found = {"fc.weight": drawn(HIDDEN, len(variant.taps) * HIDDEN), "mask_row": drawn(HIDDEN)}
    found |= {f"{name}.weight": drawn(HIDDEN, centre=centre) for name in ("hidden_norm", "norm")}
    for index in range(2):
        place = f"layers.{index}."
        for name, heads in (("q", HEADS), ("k", KEYS), ("v", KEYS)):
            found[f"{place}self_attn.{name}_proj.weight"] = drawn(heads * SIZE, HIDDEN)
        found[f"{place}self_attn.o_proj.weight"] = drawn(HIDDEN, HEADS * SIZE)
        for name in "qkvo" if variant.biases else "":
            found[f"{place}self_attn.{name}_proj.bias"] = drawn(len(found[f"{place}self_attn.{name}_proj.weight"]))
        for name in ("q_norm", "k_norm"):
            found[f"{place}self_attn.{name}.weight"] = drawn(SIZE, centre=centre)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{place}{name}.weight"] = drawn(HIDDEN, centre=centre)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            found[f"{place}mlp.{name}_proj.weight"] = drawn(*shape)
        if variant.sinks:
            found[f"{place}self_attn.attention_sink_bias"] = drawn(HEADS, std=2.0)
    if variant.embedding:
        found["embed_tokens.weight"] = drawn(variant.embedding, HIDDEN)
    if variant.head:
        found["lm_head.weight"] = drawn(variant.head, HIDDEN)
    if variant.drafted is not None:
        found["d2t"] = torch.tensor(variant.drafted) - torch.arange(len(variant.drafted))
    if variant.markov:
        rows, rank = len(variant.drafted or ()) or variant.markov_rows or variant.markov_size, 8
        found["markov_head.markov_w1.weight"] = drawn(variant.markov_size, rank)
        found["markov_head.markov_w2.weight"] = drawn(rows, rank)
        if variant.markov == "gated":
            found["markov_head.gate_proj.weight"] = drawn(rank, HIDDEN + rank)
            found["markov_head.gate_proj.bias"] = drawn(rank)
        if variant.confidence:
            found["confidence_head.proj.weight"] = drawn(1, HIDDEN + rank)
            found["confidence_head.proj.bias"] = drawn(1)
    return found


def slots_of(
    variant: Variant, tensors: Tensors, target: Any, taps: torch.Tensor, text: Sequence[int], anchor: int
) -> torch.Tensor:
    """Returns the logits of a block; see `BlockReference`."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = tensors[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight + 1.0 if variant.gemma else weight, EPS)

    def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count = variant.rotated
        angles = positions[:, None] * THETA ** (-torch.arange(0, count, 2) / count)
        cos, sin, part = angles.cos()[:, None], angles.sin()[:, None], x[..., :count]
        halves = (part[..., ::2], part[..., 1::2]) if variant.neighbours else part.chunk(2, dim=-1)
        turned = halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin
        joined = torch.stack(turned, dim=-1).flatten(-2) if variant.neighbours else torch.cat(turned, dim=-1)
        return torch.cat([joined, x[..., count:]], dim=-1)

    mask = 0 if variant.mask_row is not None else variant.mask
    embedding, ids = target.get_input_embeddings(), torch.tensor([text[anchor], *[mask] * (SLOTS - 1)])
    if variant.embedding:
        x = tensors["embed_tokens.weight"][ids]
    else:
        x = embedding(ids) if variant.embed_scale is None else embedding.weight[ids] * variant.embed_scale
    if variant.mask_row is not None:
        x = torch.cat([x[:1], tensors["mask_row"].expand(SLOTS - 1, -1)])
    context, places = norm(taps[:anchor] @ tensors["fc.weight"].T, "hidden_norm"), torch.arange(anchor + SLOTS)
    for index, (window, causal) in enumerate(variant.sights):
        place = f"layers.{index}."
        inputs = norm(x, f"{place}input_layernorm")
        both = torch.cat([context, inputs])

        def heads(x: torch.Tensor, name: str, place: str = place) -> torch.Tensor:
            made = x @ tensors[f"{place}self_attn.{name}_proj.weight"].T
            return (made + tensors.get(f"{place}self_attn.{name}_proj.bias", 0.0)).unflatten(-1, (-1, SIZE))

        queries = rotated(norm(heads(inputs, "q"), f"{place}self_attn.q_norm"), places[anchor:])
        keys = rotated(norm(heads(both, "k"), f"{place}self_attn.k_norm"), places)
        values = heads(both, "v") * variant.value_scale
        keys, values = (each.repeat_interleave(HEADS // KEYS, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * SIZE**-0.5
        ahead = places[None] - places[anchor:, None]
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        seen = seen if window is None else seen & (ahead.abs() < window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if variant.sinks:
            sink = tensors[f"{place}self_attn.attention_sink_bias"][:, None, None].expand(-1, SLOTS, -1)
            scores = torch.cat([scores, sink], dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(places)], values).flatten(1)
        x = x + mixed @ tensors[f"{place}self_attn.o_proj.weight"].T + tensors.get(f"{place}self_attn.o_proj.bias", 0.0)
        inputs = norm(x, f"{place}post_attention_layernorm")
        gate, up, down = (tensors[f"{place}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    x = norm(x, "norm")
    logits = x @ (tensors["lm_head.weight"] if variant.head else target.get_output_embeddings().weight).T
    if variant.markov:
        rows = tensors["markov_head.markov_w1.weight"][torch.tensor(text[anchor : anchor + SLOTS])]
        if variant.markov == "gated":
            gate = tensors["markov_head.gate_proj.weight"], tensors["markov_head.gate_proj.bias"]
            rows = rows * (torch.cat([x, rows], dim=-1) @ gate[0].T + gate[1]).sigmoid()
        logits = logits + (rows @ tensors["markov_head.markov_w2.weight"].T)[:, : logits.shape[1]]
    logits = logits[:, :VOCABULARY] * variant.scale
    return torch.tanh(logits / variant.cap) * variant.cap if variant.cap else logits


def of_variant(variant: Variant, target: Any) -> BlockReference:
    """Returns the drafter of a variant."""
    tensors = tensors_of(variant)
    own = {"mask_token_id": variant.mask, "target_layer_ids": [tap - 1 for tap in variant.taps], **variant.own}
    config = {
        **SIZES, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "rms_norm_eps": EPS, "hidden_act": "silu", "vocab_size": VOCABULARY, "rope_theta": THETA,
        "max_position_embeddings": 32768, "block_size": SLOTS, "num_target_layers": target.config.num_hidden_layers,
        "tie_word_embeddings": False, **variant.top, "dflash_config": own,
    }  # fmt: skip
    for name in variant.without:
        config.pop(name, own.pop(name, None))

    def named(name: str) -> str:
        old = next((old for old in variant.renamed if name.startswith(old)), "")
        new = variant.renamed.get(old, "")
        return new + (name if new == "model." else name.removeprefix(old))

    def save(folder: Path) -> None:
        left_out = ("mask_row", *variant.left_out)
        stored = {named(name): each for name, each in tensors.items() if not name.startswith(left_out)}
        write(folder, config, stored)
        if variant.mask_row is not None:
            torch.save(variant.mask_row(tensors["mask_row"].clone()), folder / "mask_embedding.pt")

    slots = partial(slots_of, variant, tensors, target)
    return BlockReference(
        "vLLM's and SGLang's formulas",
        save,
        slots,
        variant.taps,
        first_slot=int(not variant.markov),
        given=variant.given,
    )


DSPARK = {"architectures": ["DSparkDraftModel"], "markov_rank": 8, "markov_head_type": "vanilla"}
RANK = {"markov_rank": 8, "markov_head_type": "gated"}
MODELOPT = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
LAYERS, DRAFTED = [tap - 1 for tap in TAPS], tuple(range(3, VOCABULARY, 3))
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention", "full_attention"]
_SWA = {"use_swa": True, "swa_window_size": 6}
_NEAR = ((6, False), (6, False))  # windows of both layers, in which slots see later ones
_CAUSAL_NEAR = ((6, True), (6, True))

VARIANTS = {
    # Windows: vLLM's `_resolve_layer_attention`, and what ModelOpt writes for it
    "use_swa, layer_types full, causal false": Variant(
        {"layer_types": FULL, "sliding_window": 6}, {**_SWA, "causal": False}, sights=_NEAR),
    "use_swa, layer_types full": Variant({"layer_types": FULL, "sliding_window": 6}, _SWA, sights=_NEAR),
    "use_swa, no layer_types": Variant({}, _SWA, sights=_NEAR),
    "use_swa, no layer_types, causal": Variant({}, {**_SWA, "causal": True}, sights=_CAUSAL_NEAR),
    "use_swa, layer_types mixed": Variant({"layer_types": SLIDING}, _SWA, sights=((6, True), (None, False))),
    "use_swa, layer_types mixed, is_causal false": Variant(
        {"layer_types": SLIDING, "is_causal": False}, _SWA, sights=((6, False), (None, False))),
    "use_swa, other window of the target": Variant({"sliding_window": 99}, _SWA, sights=_NEAR),
    "use_swa, window at the top": Variant({"sliding_window": 6}, {"use_swa": True}, sights=_NEAR),
    "use_swa false, layer_types sliding, window in dflash_config": Variant(
        {"layer_types": SLIDING}, {"swa_window_size": 6, "use_swa": False}, sights=((6, True), (None, False))),
    "layer_types mixed": Variant({"layer_types": SLIDING, "sliding_window": 6}, sights=((6, True), (None, False))),
    "layer_types mixed, is_causal false": Variant(
        {"layer_types": SLIDING, "sliding_window": 6, "is_causal": False}, sights=((6, False), (None, False))),
    "layer_types sliding, is_causal false, window below the block": Variant(
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False}, sights=((3, False),) * 2),
    "causal in dflash_config": Variant(own={"causal": True}, sights=((None, True),) * 2),
    "layer_types full, causal": Variant({"layer_types": FULL, "is_causal": True}, sights=((None, True),) * 2),
    # Factors, layouts and sinks of the layers
    "attention_value_scale (MiMo)": Variant(own={"attention_value_scale": 0.612}, value_scale=0.612),
    "attention_value_scale at the top, which nothing reads": Variant({"attention_value_scale": 0.612}),
    "sinks (MiMo)": Variant(own={"attention_sink_bias": True}, sinks=True),
    "sinks, value scale, use_swa (MiMo)": Variant(
        own={**_SWA, "attention_sink_bias": True, "attention_value_scale": 0.612}, sights=_NEAR, sinks=True,
        value_scale=0.612),
    "add_swa_attention_sink_bias at the top": Variant({"add_swa_attention_sink_bias": True}, sinks=True),
    "is_neox_style false": Variant({"is_neox_style": False}, neighbours=True),
    "rope_is_neox_style false": Variant({"rope_is_neox_style": False}, neighbours=True),
    "rope_is_neox_style true before is_neox_style": Variant({"rope_is_neox_style": True, "is_neox_style": False}),
    "use_gemma_norm (MiniMax)": Variant({"use_gemma_norm": True}, gemma=True),
    "use_gemma_norm, is_neox_style false": Variant(
        {"use_gemma_norm": True, "is_neox_style": False}, gemma=True, neighbours=True),
    # Rotary widths: z-lab ignores the factor, vLLM applies it, which a trial decides; SGLang's `rope_dim` is told
    "partial_rotary_factor, ignored": Variant({"partial_rotary_factor": 0.5}),
    "partial_rotary_factor, told to be applied": Variant(
        {"partial_rotary_factor": 0.5}, rotated=SIZE // 2, given={"rotates_whole_heads": False}),
    "rope_dim of a whole head, copied factor": Variant(
        {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25,
                             "rope_dim": SIZE, "mrope_section": [1, 1, 2]}}, without=("rope_theta",)),
    "rope_dim of half a head, neighbours": Variant(
        {"rope_scaling": {"rope_type": "default", "rope_dim": SIZE // 2}, "is_neox_style": False},
        rotated=SIZE // 2, neighbours=True),
    "last layer": Variant(taps=(1, 3, 6), own={"target_layer_ids": [0, 2, 5]}),
    "last layer, told to be before the norm": Variant(
        taps=(1, 3, 7), own={"target_layer_ids": [0, 2, 5]}, given={"last_tap_is_normed": False}),
    "logit_scale (Cohere)": Variant({"logit_scale": 0.0625}, scale=0.0625),
    "factor and cap of logits": Variant(
        own={"output_multiplier": 0.5, "final_logit_softcapping": 3.0}, scale=0.5, cap=3.0),
    "attention_bias": Variant({"attention_bias": True}, biases=True),
    "target that scales, its rows told": Variant(own={"input_embedding_scale": 1.0}, embed_scale=1.0),
    # Tables of the drafter's own: vLLM's `process_eagle_weight` and `Qwen3DSparkForCausalLM`
    "own embed_tokens": Variant(embedding=VOCABULARY),
    "own lm_head": Variant(head=VOCABULARY),
    "own embed_tokens and lm_head": Variant(embedding=VOCABULARY, head=VOCABULARY),
    "d2t": Variant({"draft_vocab_size": 32}, head=32, drafted=DRAFTED),
    "d2t, has_lm_head, own embed_tokens": Variant(
        {"draft_vocab_size": 32, "has_lm_head": True}, head=32, drafted=DRAFTED, embedding=VOCABULARY),
    "vocabulary padded": Variant({"vocab_size": 103}),
    "vocabulary padded, own tables": Variant({"vocab_size": 103}, embedding=103, head=103),
    "vocabulary padded, d2t": Variant({"vocab_size": 103, "draft_vocab_size": 32}, head=32, drafted=DRAFTED),
    "own embed_tokens, mask beyond the target's": Variant(
        {"vocab_size": 103, "draft_vocab_size": VOCABULARY}, embedding=103, mask=102),
    "own embed_tokens with more rows than vocab_size": Variant(embedding=103, mask=102),
    "DSpark, own embed_tokens, mask beyond the target's": Variant(
        {**DSPARK, "vocab_size": 103, "draft_vocab_size": VOCABULARY}, embedding=103, mask=102, markov="vanilla",
        markov_size=103, markov_rows=VOCABULARY),
    "DSpark, vocabulary padded": Variant({**DSPARK, "vocab_size": 103}, markov="vanilla", markov_size=103),
    "DSpark, vocabulary padded, own tables": Variant(
        {**DSPARK, **RANK, "vocab_size": 103}, embedding=103, head=103, markov="gated", markov_size=103),
    "DSpark, draft_vocab_size padded, own lm_head": Variant(
        {**DSPARK, "draft_vocab_size": 103}, head=103, markov="vanilla", markov_rows=103),
    "DSpark, d2t": Variant({**DSPARK, "draft_vocab_size": 32}, head=32, drafted=DRAFTED, markov="vanilla"),
    "DSpark, logit_scale": Variant({**DSPARK, **RANK, "logit_scale": 0.0625}, markov="gated", scale=0.0625),
    # Names
    "DSpark, markov_head, no projector_type": Variant({"architectures": ["DSparkDraftModel"]}, RANK, markov="gated"),
    "DSpark, ModelOpt's names, confidence head": Variant(
        own={**RANK, "projector_type": "dspark", "shift_label": True, "use_confidence_head": True},
        renamed=MODELOPT, markov="gated", confidence=True),
    "DSpark, ModelOpt's names, no confidence head": Variant(
        own={**RANK, "projector_type": "dspark", "shift_label": True, "use_confidence_head": False},
        renamed=MODELOPT, markov="gated"),
    "DSpark, ModelOpt's names, no projector_type": Variant(own=RANK, renamed=MODELOPT, markov="gated"),
    "DSpark, fields with prefix": Variant(
        {"dspark_markov_rank": 8, "dspark_markov_head_type": "gated", "dspark_noise_token_id": MASK,
         "dspark_target_layer_ids": LAYERS, "dspark_block_size": SLOTS, "architectures": ["DSparkDraftModel"]},
        without=("mask_token_id", "target_layer_ids", "block_size"), markov="gated"),
    "mask token as ptd_token_id": Variant({"ptd_token_id": MASK}, without=("mask_token_id",)),
    "mask token as pard_token": Variant({"pard_token": MASK}, without=("mask_token_id",)),
    "layers as eagle_aux_hidden_state_layer_ids": Variant(
        {"eagle_aux_hidden_state_layer_ids": list(TAPS)}, without=("target_layer_ids",)),
    "layers as layer_ids": Variant(own={"layer_ids": list(TAPS)}, without=("target_layer_ids",)),
    "layers not named": Variant(without=("target_layer_ids",), taps=(2, 4)),
    "mask_embedding.pt: a tensor": Variant(mask_row=lambda row: row),
    "mask_embedding.pt: a dict": Variant(
        mask_row=lambda row: {"embedding": row[None], "mask_token_id": MASK, "per_position": False}),
    "mask_embedding.pt, mask beyond the vocabulary": Variant(
        mask=VOCABULARY, mask_row=lambda row: {"embedding": row, "mask_token_id": VOCABULARY}),
    "block_size in dflash_config": Variant({"block_size": None}, {"block_size": SLOTS}),
    "fields at the top": Variant({"mask_token_id": MASK, "target_layer_ids": LAYERS}, without=("dflash_config",)),
    "no architectures": Variant({"architectures": None}),
    "architectures of a language model": Variant({"architectures": ["Qwen3ForCausalLM"]}),
    "tensors with a prefix": Variant(renamed=dict.fromkeys(("fc.", "hidden_norm.", "layers.", "norm."), "model.")),
    "tensors by names of transformers and EAGLE-3": Variant(renamed={
        "fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "layers.0.": "midlayer."}),
    # What a target's configuration has, and z-lab's class does not read
    "layer_types of a longer target": Variant({"layer_types": ["linear_attention", "full_attention"] * 4}),
    "copied switches": Variant({
        "attn_output_gate": True, "use_aux_hidden_state": True, "is_decoder": True, "has_lm_head": False,
        "output_hidden_states": True, "use_qk_norm": True, "tie_word_embeddings": True, "num_experts": 8,
        "output_router_logits": True, "has_own_lm_head": False}, {"use_aux_hidden_state": True}),
}  # fmt: skip
# What is not drafted with, and says so
_REFUSED = {
    "LiLiCorr": Variant(own={"lilicorr_num_layers": 2}),
    "Kimi K3's DSpark (MLA)": Variant({"architectures": ["K3DSparkModel"]}),
    "another DSpark with MLA": Variant(DSPARK, renamed={"layers.0.self_attn.k_proj": "layers.0.self_attn.kv_a_proj"}),
    "Clover": Variant({"architectures": ["CloverForCausalLM"], "model_type": "clover"}),
    "Laguna's DFlash": Variant({"architectures": ["DFlashLagunaForCausalLM"]}),
    "DeepSeek V4's DSpark": Variant({"model_type": "deepseek_v4", "architectures": ["DSparkDraftModel"]}),
    "DFlare": Variant({"architectures": ["DFlareDraftModel"]}),
    "an unknown number": Variant(own={"residual_scale": 0.5}),
    "an unknown switch": Variant(own={"embed_norm": True}),
    "no mask token": Variant(without=("mask_token_id",)),
    "sinks without their scores": Variant(own={"attention_sink_bias": True}),
    "windows that contradict": Variant({"layer_types": SLIDING, "sliding_window": 6}, {"swa_window_size": 5}),
    "causality that contradicts": Variant({"is_causal": True}, {"causal": False}),
    "a mask beyond all embeddings": Variant(mask=VOCABULARY),
    "descending layers": Variant(own={"target_layer_ids": [4, 2, 0]}),
}
REFUSED = tuple(Case(f"z-lab layout, {name}", partial(of_variant, variant)) for name, variant in _REFUSED.items())
CASES = tuple(
    Case(f"z-lab layout, {name}", partial(of_variant, variant), SCALING if "scales" in name else {})
    for name, variant in VARIANTS.items()
)
