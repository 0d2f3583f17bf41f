"""Parity of block drafters with the implementations that their formats come from: speculators, JetSpec, transformers.

Each case builds a small drafter of random weights by the reference's class, writes it as its format says, loads it, and
decodes with it. Every draft of the call is then computed by the reference, on the same accepted text.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    Qwen3Config,
)
from transformers.cache_utils import DFlashCache
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextMLP,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from hf_hsdraft.core.cache_name import CACHE
from hf_hsdraft.methods.published.target_copies import before_norm
from oracles.format_parity import (
    HIDDEN,
    NEW_TOKENS,
    OF_TARGET,
    SIZES,
    VOCABULARY,
    Case,
    NotingDrafter,
    Parity,
    Reference,
    Round,
    compared,
    randomise,
    speculators_drafter,
    taps_of,
    texts_of,
    tiny_target,
    without,
    write,
)

TAPS, SLOTS, MASK = (1, 3, 5), 5, 90
DRAFTED = tuple(range(2, VOCABULARY, 2))  # a part of the vocabulary
_LAYOUT = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]}


@dataclass(frozen=True)
class BlockReference(Reference):
    """A block drafter by the implementation that its format comes from.

    Its `logits` returns those `[slots, V']` of all slots of a block after the tokens of the text, minus infinity where
    a token cannot be drafted. It is given the taps `[T, taps * D]`, the tokens of the text, more of them than are
    accepted, and the anchor's position.
    """

    taps: Sequence[int] = TAPS
    first_slot: int = 0  # of the first draft


@cache
def _target_of(fields: tuple[tuple[str, Any], ...]) -> Any:
    return tiny_target(**dict(fields))


def parity(case: Case, new_tokens: int = NEW_TOKENS, every: int = 1) -> Parity:
    """Compares our drafts of a format with the reference's, in a real call on a batch of padded prompts.

    `every` is told to `compared`.
    """
    target = _target_of(tuple(case.target.items()))
    reference = cast(BlockReference, case.make(target))
    noting = NotingDrafter(reference.loaded())
    texts, _ = texts_of(target, noting, new_tokens)
    longer = [[*text, *[11] * (2 * SLOTS)] for text in texts]  # the reference wants tokens after the block
    taps = [taps_of(target, text, reference.taps) for text in longer]

    def distance(each: Round, _: Sequence[int]) -> float:
        anchor, text = each.length - 1, longer[each.row]
        found = each.log_probs(text[anchor : anchor + SLOTS])
        logits = reference.logits(taps[each.row], text, anchor)
        wanted = logits[reference.first_slot :][: len(found)].log_softmax(dim=-1)
        assert torch.equal(found.isinf(), wanted.isinf()), "other tokens can be drafted"
        return float((found - wanted)[~wanted.isinf()].abs().max())

    with torch.no_grad():
        return compared(case.name, reference.name, noting.rounds, texts, distance, every)


def speculators_model(
    target: Any, kind: str, layer: dict[str, Any] | None = None, ids: Sequence[int] | None = None, **fields: Any
) -> Any:
    """Returns a drafter of the package speculators for a target; `layer` are fields of its layers' configuration."""
    layers = Qwen3Config(**{"vocab_size": VOCABULARY, "num_hidden_layers": 2, **SIZES, **(layer or {})})
    taps = {"aux_hidden_state_layer_ids": list(TAPS), "mask_token_id": MASK, "block_size": SLOTS}
    model = speculators_drafter(kind, layers, ids, SLOTS, **{**taps, **fields})
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        model.lm_head.weight.copy_(target.get_output_embeddings().weight[list(ids or range(VOCABULARY))])
    return model


def speculators_slots(model: Any, taps: torch.Tensor, text: Sequence[int], anchor: int) -> torch.Tensor:
    """Returns the logits of a block by a drafter of speculators; see `BlockReference`."""
    ids, loss_mask = torch.tensor([list(text)]), torch.zeros(1, len(text), dtype=torch.bool)
    loss_mask[0, anchor] = True
    last = torch.zeros(1, len(text), HIDDEN)
    documents = torch.zeros(1, len(text), dtype=torch.int64)
    hidden, logits, *_ = model._backbone_forward(taps[None], ids, loss_mask, last, documents, max_anchors=1)
    hidden, logits = hidden[0], logits[0]
    before = torch.tensor([list(text[anchor : anchor + SLOTS])])
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    if getattr(model, "markov_head", None) is not None:
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden[None])[0]
        return logits + bias
    if getattr(model, "refiner_head", None) is not None:
        if not model.config.sample_from_anchor:
            before[0, 0] = text[anchor - 1]
        return logits + model.refiner_head.block_bias(before, hidden_states=hidden[None])[0]
    if getattr(model, "prefix_gru", None) is not None:
        return logits + _domino_bias(model, hidden, list(text[anchor : anchor + SLOTS]))
    if getattr(model, "candidate_selector", None) is not None:
        ids, scores = model.candidate_selector.select(logits[None], hidden[None], before)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids[0], scores[0])
    return logits


def _domino_bias(model: Any, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Returns the bias `[slots, V']` by Domino's formula: the GRU reads the tokens before a slot's draft, all at once.

    Written after SpecForge's `DominoDraftModel.apply_logits_head`, in both of its layouts.
    """
    read = model.prefix_gru(model.embed_tokens.weight[list(tokens)])[0]
    first = 0 if model.config.sample_from_anchor else 1
    states = read if model.config.sample_from_anchor else torch.cat([read[:1], read[:-1]])
    bias = model.embed_proj(torch.cat([hidden, states], dim=-1))
    return torch.cat([torch.zeros_like(bias[: first + DOMINO[2]]), bias[first + DOMINO[2] :]])


def of_domino(target: Any, shift_label: bool, early: bool = False) -> BlockReference:
    """Returns a Domino drafter as SpecForge writes it: DFlash by the class of speculators, and a recurrent head.

    `early` files have the head's tensors under another name.
    """
    model = speculators_model(target, "dflash", sample_from_anchor=shift_label)
    gru, rank, free = DOMINO
    torch.manual_seed(5)
    model.prefix_gru = nn.GRU(HIDDEN, gru, batch_first=True, bias=False)
    first, last = nn.Linear(HIDDEN + gru, rank, bias=False), nn.Linear(rank, VOCABULARY, bias=False)
    model.embed_proj = nn.Sequential(first, nn.SiLU(), last)
    own = {"projector_type": "domino", "pure_draft_prefix_len": free, "emb_dim": rank, "gru_hidden_dim": gru}
    config = {"block_size": SLOTS, "emb_dim": rank, "dflash_config": {**own, **_LAYOUT, "shift_label": shift_label}}
    config |= {**_layer_fields(model), "architectures": ["DominoDraftModel"]}
    heads = ("prefix_gru.", "embed_proj.")
    tensors = {
        f"logit_head.{name}" if early and name.startswith(heads) else name: tensor
        for name, tensor in without(model, OF_TARGET).items()
    }
    slots, save = partial(speculators_slots, model), partial(write, config=config, tensors=tensors)
    return BlockReference("DFlashDraftModel, and the formula", save, slots, first_slot=0 if shift_label else 1)


def of_speculators(target: Any, kind: str, left_out: Sequence[str] = (), **fields: Any) -> BlockReference:
    """Returns a drafter as the package speculators saves it; further arguments are those of `speculators_model`.

    Fields of config.json may be `left_out`.
    """
    model = speculators_model(target, kind, **fields)
    first = 0 if model.config.sample_from_anchor else 1
    slots = partial(speculators_slots, model)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        document = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in document.items() if name not in left_out}
        (folder / "config.json").write_text(json.dumps(kept))

    taps = before_norm(model.config.aux_hidden_state_layer_ids, target.config.num_hidden_layers)
    return BlockReference(type(model).__name__, save, slots, taps, first_slot=first)


def _layer_fields(model: Any) -> dict[str, Any]:
    """The fields of the layers, as formats have them that write them beside their own."""
    fields = model.config.transformer_layer_config.to_dict()
    left_out = {"architectures", "dtype", "transformers_version", "_name_or_path", "rope_parameters"}
    fields = {name: value for name, value in fields.items() if name not in left_out}
    parameters = model.config.transformer_layer_config.rope_parameters
    return {**fields, "rope_theta": parameters["rope_theta"]}


def renamed(
    model: Any, architecture: str, left_out: Sequence[str], first_slot: int = 0, **config: Any
) -> BlockReference:
    """Returns a drafter of speculators in files of another project: `config` are fields beside those of the layers."""
    config = {**_layer_fields(model), "architectures": [architecture], **config}
    save = partial(write, config=config, tensors=without(model, left_out))
    return BlockReference(type(model).__name__, save, partial(speculators_slots, model), first_slot=first_slot)


def _heads_of(model: Any) -> dict[str, Any]:
    own = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {name: getattr(model.config, name) for name in own}


def of_deepspec(target: Any, copied: dict[str, Any] | None = None, **fields: Any) -> BlockReference:
    """Returns a DSpark drafter as DeepSpec writes it, by the class of speculators. It brings copies of the target's.

    `copied` are fields that are a copy of the target's, which the drafter's layers do not read.
    """
    model = speculators_model(target, "dspark", **fields)
    own = {"block_size": SLOTS, "num_anchors": 512, **_LAYOUT, **_heads_of(model), **(copied or {})}
    made = renamed(model, "Qwen3DSparkModel", OF_TARGET[2:], **own)
    taps = [layer + 1 for layer in own["target_layer_ids"]]
    return replace(made, taps=before_norm(taps, target.config.num_hidden_layers))


def of_specforge(target: Any, **fields: Any) -> BlockReference:
    """Returns a DSpark drafter as SpecForge writes it, by the class of speculators: DFlash with heads, anchor first."""
    model = speculators_model(target, "dspark", **fields)
    own = {"attention_mode": "gqa", "projector_type": "dspark", "confidence_head_alpha": 1.0, **_LAYOUT}
    layers = target.config.num_hidden_layers
    return renamed(
        model, "DSparkDraftModel", OF_TARGET, block_size=SLOTS, num_target_layers=layers,
        dflash_config={**own, **_heads_of(model)},
    )  # fmt: skip


def of_zlab2(target: Any, codebooks: bool = False) -> BlockReference:
    """Returns a DFlash2 drafter as z-lab writes it, by the class of speculators; `codebooks` are modules in some."""
    model = speculators_model(target, "dflash2", **DFLASH2)
    own = {**_LAYOUT, "block_size": SLOTS, **DFLASH2}
    made = renamed(model, "DFlash2DraftModel", OF_TARGET, first_slot=1, dflash_config=own)
    if not codebooks:
        return made

    def save(folder: Path) -> None:
        made.save(folder)
        tensors = load_file(folder / "model.safetensors")
        end = "_codebook"
        tensors = {f"{name}.weight" if name.endswith(end) else name: each for name, each in tensors.items()}
        save_file(tensors, folder / "model.safetensors")

    return replace(made, save=save)


class GemmaLayer(nn.Module):
    """A layer of a DSpark drafter for Gemma 4, of transformers' modules; it keeps nothing between its calls."""

    def __init__(self, config: Gemma4TextConfig, shared: bool) -> None:
        super().__init__()
        width, size, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        keys = config.num_key_value_heads * size
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(width, config.num_attention_heads * size, bias=False),
            "k_proj": nn.Linear(width, keys, bias=False),
            **({} if shared else {"v_proj": nn.Linear(width, keys, bias=False)}),
            "o_proj": nn.Linear(config.num_attention_heads * size, width, bias=False),
            "q_norm": Gemma4RMSNorm(size, eps),
            "k_norm": Gemma4RMSNorm(size, eps),
        })  # fmt: skip
        self.value_norm = Gemma4RMSNorm(size, eps, with_scale=False)
        self.mlp = Gemma4TextMLP(config, 0)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", Gemma4RMSNorm(width, eps))
        self.register_buffer("layer_scalar", torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns slots `[n, D]` after the layer, with context `[p, D]`, cosines and sines `[p + n, size]` of both."""
        module: Any = self  # norms were set by name
        part, inputs = module.self_attn, module.input_layernorm(x)
        both = torch.cat([context, inputs])

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, module.self_attn["q_norm"].weight.shape[0]))

        queries = apply_rotary_pos_emb(part["q_norm"](heads(part["q_proj"](inputs))), cos[-len(x) :], sin[-len(x) :])
        keys = apply_rotary_pos_emb(part["k_norm"](heads(part["k_proj"](both))), cos, sin)
        values = self.value_norm(heads((part["v_proj"] if "v_proj" in part else part["k_proj"])(both)))
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
        shares = torch.einsum("qhd,khd->hqk", queries, keys).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, values).flatten(1)
        x = x + module.post_attention_layernorm(part["o_proj"](mixed))
        x = x + module.post_feedforward_layernorm(module.mlp(module.pre_feedforward_layernorm(x)))
        return x * module.layer_scalar


def of_gemma(target: Any, shared: bool = False) -> BlockReference:
    """Returns a DSpark drafter as DeepSpec writes it for Gemma 4; `shared` makes values by the product for keys."""
    kinds = ["full_attention"] * 2
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0}
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=kinds, rope_parameters={"full_attention": rope},
        hidden_size_per_layer_input=0, per_layer_config={},
    )  # fmt: skip
    model: Any = nn.ModuleDict({
        "fc": nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False),
        "hidden_norm": Gemma4RMSNorm(HIDDEN, config.rms_norm_eps),
        "layers": nn.ModuleList(GemmaLayer(config, shared) for _ in kinds),
        "norm": Gemma4RMSNorm(HIDDEN, config.rms_norm_eps),
        "markov_head": nn.ModuleDict({
            "markov_w1": nn.Embedding(VOCABULARY, 8), "markov_w2": nn.Linear(8, VOCABULARY, bias=False)}),
    })  # fmt: skip
    randomise(model)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    rotary = Gemma4TextRotaryEmbedding(config)

    def slots(taps: torch.Tensor, text: Sequence[int], anchor: int) -> torch.Tensor:
        context = model["hidden_norm"](model["fc"](taps[:anchor]))
        x = embedding(torch.tensor([text[anchor], *[MASK] * (SLOTS - 1)]))
        cos, sin = rotary(x, torch.arange(anchor + SLOTS)[None], "full_attention")
        for layer in model["layers"]:
            x = layer(x, context, cos[0], sin[0])
        logits = torch.tanh(head(model["norm"](x)) / 30.0) * 30.0
        heads = model["markov_head"]
        return logits + heads["markov_w2"](heads["markov_w1"](torch.tensor(text[anchor : anchor + SLOTS])))

    fields = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "num_global_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "attention_k_eq_v": shared, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 99.0}},
        "layer_types": kinds, "sliding_window": 512, "final_logit_softcapping": 30.0, "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "tie_word_embeddings": False,
        "block_size": SLOTS, **_LAYOUT, "num_anchors": 512,
        "num_target_layers": target.config.num_hidden_layers, "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": False, "target_model_type": "gemma4",
    }  # fmt: skip
    save = partial(write, config=fields, tensors=model.state_dict())
    return BlockReference("modules of Gemma 4", save, slots)


def muse_model(**fields: Any) -> MuseGlimmerAssistantModel:
    """Returns a DFlash drafter of transformers."""
    known: dict[str, Any] = {**SIZES, **_LAYOUT, "num_hidden_layers": 2, "block_size": SLOTS}
    known |= {"layer_types": ["full_attention"] * 2, "attn_implementation": "eager"}
    known["rope_parameters"] = {"rope_type": "default", "rope_theta": 7000.0}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**known, **fields})).eval()
    randomise(model, seed=2)
    return model


def muse_slots(
    model: MuseGlimmerAssistantModel,
    target: Any,
    taps: torch.Tensor,
    text: Sequence[int],
    anchor: int,
    causal: bool = False,
) -> torch.Tensor:
    """Returns the logits of a block by a drafter of transformers; see `BlockReference`."""
    later = torch.full((SLOTS, anchor + SLOTS), -torch.inf).triu(anchor + 1)[None, None]
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(anchor)
    ids = torch.tensor([[text[anchor], *[MASK] * (SLOTS - 1)]])
    output = model(
        noise_embeds=target.get_input_embeddings()(ids),
        context_hidden_states=taps[None, :anchor],
        attention_mask={"full_attention": later} if causal else None,
        position_ids=torch.arange(anchor + SLOTS)[None],
        **{CACHE: cache},
    )
    return target.get_output_embeddings()(output.last_hidden_state)[0]


def of_transformers(target: Any, **fields: Any) -> BlockReference:
    """Returns a DFlash drafter as transformers saves it."""
    model = muse_model(**fields)
    slots = partial(muse_slots, model, target)
    return BlockReference(type(model).__name__, model.save_pretrained, slots, first_slot=1)


def of_zlab(target: Any, causal: bool = False, by_authors: bool = False) -> BlockReference:
    """Returns a DFlash drafter as z-lab writes it, by the class of transformers.

    `causal` makes it a JetSpec head, whose slots see no later ones; `by_authors` computes that by its authors' class,
    from the package `jetspec`.
    """
    model = muse_model()
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    tensors = {names.get(name, name): tensor for name, tensor in model.state_dict().items()}
    config = {
        **{name: getattr(model.config, name) for name in (*SIZES, "num_hidden_layers", "rms_norm_eps", "hidden_act")},
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "vocab_size": VOCABULARY,
        "rope_theta": 7000.0,
        "max_position_embeddings": 32768,
        "block_size": SLOTS,
        "num_target_layers": target.config.num_hidden_layers,
        "dflash_config": {**_LAYOUT, **({"causal_head": True} if causal else {})},
        "tie_word_embeddings": True,
        "use_cache": True,
    }
    save = partial(write, config=config, tensors=tensors)
    slots, name = partial(muse_slots, model, target, causal=causal), type(model).__name__
    if by_authors:
        slots, name = jetspec_slots(config, tensors, target), "DFlashDraftModel of JetSpec"
    return BlockReference(name, save, slots, first_slot=1)


def jetspec_slots(config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Any) -> Any:
    """Returns the drafts of a head by JetSpec's own loader and network, as its tree drafter calls it."""
    from jetspec.models.draft_head import extract_context_feature, load_draft_head

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config, tensors)
        head = load_draft_head(folder, device="cpu", dtype=torch.float32)
    numbered = [torch.full((1, 1, 1), float(layer)) for layer in range(8)]
    assert extract_context_feature(numbered, head.target_layer_ids).flatten().tolist() == list(TAPS)

    def slots(taps: torch.Tensor, text: Sequence[int], anchor: int) -> torch.Tensor:
        ids = torch.tensor([[text[anchor], *[head.mask_token_id] * (head.block_size - 1)]])
        hidden = head(
            target_hidden=taps[None, :anchor],
            noise_embedding=target.model.embed_tokens(ids),
            position_ids=torch.arange(anchor + head.block_size)[None],
            is_causal=head.resolve_causal_head("auto"),
        )
        return target.lm_head(hidden)[0]

    return slots


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
DFLASH2: dict[str, Any] = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 12}
HEAD = {"markov_rank": 8}
DOMINO = (12, 8, 1)  # width of the recurrent state, rank, depths without the bias
_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25,
                        "mrope_interleaved": True, "mrope_section": [1, 1, 2]},
}  # fmt: skip
SCALING = {
    "kind": Gemma3TextConfig, "head_dim": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 8, "sliding_window": 64,
}  # fmt: skip

CASES = tuple(
    Case(name, partial(make, **fields), SCALING if "scales" in name else {})
    for name, make, fields in (
        ("speculators dflash", partial(of_speculators, kind="dflash"), {"ids": DRAFTED}),
        ("speculators dflash, whole vocabulary, YaRN", partial(of_speculators, kind="dflash"), {
            "layer": {"rope_parameters": YARN, "max_position_embeddings": 64}}),
        ("speculators dflash, sliding", partial(of_speculators, kind="dflash"), {"layer": SLIDING}),
        ("speculators dflash, anchor first, biases", partial(of_speculators, kind="dflash"), {
            "sample_from_anchor": True, "layer": {"attention_bias": True, "rope_parameters": {
                "rope_type": "default", "rope_theta": 300.0}}}),
        ("speculators dflash, sliding, not causal", partial(of_speculators, kind="dflash"), {
            "layer": SLIDING, "sliding_window_non_causal": True}),
        ("speculators dflash, sliding, causality not told", partial(of_speculators, kind="dflash"), {
            "layer": SLIDING, "left_out": ["sliding_window_non_causal"]}),
        ("speculators dflash, last layer before the norm", partial(of_speculators, kind="dflash"), {
            "aux_hidden_state_layer_ids": [1, 3, 6]}),
        ("speculators dflash, rotary factor of the target", partial(of_speculators, kind="dflash"), {
            "layer": {"rope_parameters": {
                "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25}}}),
        ("speculators dflash, target that scales, its rows", partial(of_speculators, kind="dflash"), {}),
        ("speculators dflash2", partial(of_speculators, kind="dflash2"), DFLASH2),
        ("speculators dflash2, sliding", partial(of_speculators, kind="dflash2"), {**DFLASH2, "layer": SLIDING}),
        ("speculators dspark, vanilla", partial(of_speculators, kind="dspark"), {**HEAD, "ids": DRAFTED}),
        ("speculators dspark, gated", partial(of_speculators, kind="dspark"), {**HEAD, "markov_head_type": "gated"}),
        ("speculators dspark, rnn", partial(of_speculators, kind="dspark"), {**HEAD, "markov_head_type": "rnn"}),
        ("speculators dspark, rnn, fill-in", partial(of_speculators, kind="dspark"), {
            **HEAD, "markov_head_type": "rnn", "sample_from_anchor": False, "confidence_head_with_markov": False}),
        ("speculators dspark, rank 0", partial(of_speculators, kind="dspark"), {
            "markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}),
        ("speculators xpress", partial(of_speculators, kind="xpress"), {"xpress_rank": 8, "std": 0.2}),
        ("speculators xpress, anchor first, part of the vocabulary", partial(of_speculators, kind="xpress"), {
            "xpress_rank": 8, "xpress_mlp_ratio": 3, "sample_from_anchor": True, "ids": DRAFTED, "std": 0.2}),
        ("speculators dspark, first slot not told", partial(of_speculators, kind="dspark"), {
            **HEAD, "left_out": ["sample_from_anchor"]}),
        ("speculators dspark, fill-in", partial(of_speculators, kind="dspark"), {**HEAD, "sample_from_anchor": False}),
        ("speculators dspark, confidence of the state alone", partial(of_speculators, kind="dspark"), {
            **HEAD, "confidence_head_with_markov": False}),
        ("DeepSpec, vanilla", of_deepspec, HEAD),
        ("DeepSpec, gated", of_deepspec, {**HEAD, "markov_head_type": "gated"}),
        ("DeepSpec, rnn", of_deepspec, {**HEAD, "markov_head_type": "rnn"}),
        ("DeepSpec, embeddings and the last layer before the norm", of_deepspec, {
            **HEAD, "copied": {"target_layer_ids": [-1, 2, 5]}}),
        ("DeepSpec, rank 0 (DFlash, anchor first)", of_deepspec, {
            "markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}),
        ("DeepSpec, copy of Qwen3.5", of_deepspec, {
            **HEAD, "copied": _QWEN3_5, "layer": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}}),
        ("DeepSpec, Gemma 4 that scales", of_gemma, {}),
        ("DeepSpec, Gemma 4 that scales, shared values", of_gemma, {"shared": True}),
        ("SpecForge DSpark", of_specforge, HEAD),
        ("SpecForge DSpark, gated, no confidence", of_specforge, {
            **HEAD, "markov_head_type": "gated", "enable_confidence_head": False,
            "confidence_head_with_markov": False}),
        ("SpecForge DSpark, rnn", of_specforge, {**HEAD, "markov_head_type": "rnn"}),
        ("SpecForge Domino", of_domino, {"shift_label": True}),
        ("SpecForge Domino, fill-in, early names", of_domino, {"shift_label": False, "early": True}),
        ("z-lab DFlash", of_zlab, {}),
        ("z-lab DFlash, target that scales", of_zlab, {}),
        ("z-lab DFlash2", of_zlab2, {}),
        ("z-lab DFlash2, codebooks as modules", of_zlab2, {"codebooks": True}),
        ("JetSpec", of_zlab, {"causal": True}),
        ("JetSpec, by its authors' code", of_zlab, {"causal": True, "by_authors": True}),
        ("transformers DFlash", of_transformers, {}),
        ("transformers DFlash, sliding alone", of_transformers, {
            "layer_types": ["sliding_attention"] * 2, "sliding_window": 9}),
        ("transformers DFlash, sliding", of_transformers, {"layer_types": SLIDING["layer_types"], "sliding_window": 6}),
    )
)  # fmt: skip
