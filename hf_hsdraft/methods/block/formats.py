"""Published formats of block drafters, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...core.checks import printable
from ..published.checkpoint import AnyCheckpoint, speculators_type
from ..published.format_table import FOREIGN, OURS, PublishedFormat, same, shown, speculators, taps, told
from ..published.layer_tables import OF_GEMMA, gemma_sizes, rope
from ..published.refusals import register_refusal
from . import rows
from .drafter import BlockDrafter

# DeepSpec starts from a copy of the target's configuration, of any type, and builds Qwen3 layers from it.
_COPIED = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text")
_ASSISTANT = "muse_glimmer_assistant"


_COMMON = {
    "output_multiplier": rows.multiplier,
    "learned_mask": rows.learned_mask,
    "mask_token_id": rows.mask_token,
    "rotates_whole_heads": rows.rotates_in_part,
    "own_embedding": shown("embed_tokens.weight"),
    "own_head": shown("lm_head.weight"),
}
_TRUNK = {
    **same("num_hidden_layers"),
    "vocab_size": rows.tokens,
    "draft_vocab_size": rows.output_tokens,
    "num_input_tokens": rows.input_tokens,
    "block_size": rows.nested("block_size"),
    "target_hidden_size": told("target_hidden_size", "hidden_size"),
    "sizes": rows.block_sizes,
    "target_num_hidden_layers": told("num_target_layers", default=None),
}
_MARKOV = same("markov_head_type", default=OURS)
_SIZES_OF_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_ROPE, _ROTATION = rope("sliding_attention", in_part=True), {"rotates_whole_heads": rows.rotates_in_part}
_OPEN_IN_DFLASH = {
    **_ROTATION,
    "embedding_scale": (f"{rows.OWN}.input_embedding_scale", "input_embedding_scale"),
    "last_tap_is_normed": rows.may_read_last,
}
_OPEN_IN_SPECULATORS = {"dspark": {**_ROTATION, "sample_from_anchor": ("sample_from_anchor",)}}

_OF_SPECULATORS = {
    **_COMMON,
    "target_tap_layers": taps({"aux_hidden_state_layer_ids": 0}),
    "sizes": rows.block_sizes,
    **same("block_size", default=8),
    **same("sample_from_anchor", default=False),
    "sights": rows.of_anchor(False),
    "rope": _ROPE,
    # Only this package writes it, for drafters in z-lab's format.
    "embedding_scale": lambda files, _: None if files.top.flag("target_scales_embeddings", False) else 1.0,
}
_HEADS_OF_SPECULATORS = {
    "dflash": {},
    "xpress": {"xpress_rank": told("xpress_rank", default=256), **same("xpress_mlp_ratio", default=OURS)},
    "dflash2": {
        "sights": rows.of_anchor(True),
        **{name: told(name, default=usual) for name, usual in _SIZES_OF_DFLASH2.items()},
    },
    "dspark": {
        **_MARKOV,
        **same("sample_from_anchor", default=True),
        **same("markov_rank", default=256),
        "confidence_head": rows.confidence(True),
    },
}

_OF_DFLASH = {
    **_COMMON,
    **_TRUNK,
    "target_tap_layers": rows.taps_of_dflash,
    "target_num_hidden_layers": rows.nested("num_target_layers", None),
    "block_size": rows.nested("block_size", 16),
    "sample_from_anchor": rows.anchor_first(False),
    "sights": rows.sights_of_dflash,
    "rope": _ROPE,
    # Embeddings have the target's factor, if any.
    "embedding_scale": rows.nested("input_embedding_scale", None),
    "final_logit_softcapping": rows.nested("final_logit_softcapping", OURS),
    "last_tap_is_normed": True,
}
_HEADS_OF_DFLASH = {
    "SpecForge DSpark": {
        "sample_from_anchor": rows.anchor_first(True),
        "markov_rank": rows.nested("markov_rank", 0),
        "markov_head_type": rows.nested("markov_head_type", OURS),
        "confidence_head": rows.shown_confidence,
    },
    "SpecForge Domino": {
        "domino_rank": rows.nested("emb_dim"),
        "gru_size": rows.nested("gru_hidden_dim"),
        "free_depths": rows.nested("pure_draft_prefix_len", 0),  # the first slots that draft go without it
    },
    "z-lab DFlash2": {name: rows.nested(name) for name in _SIZES_OF_DFLASH2},
    "z-lab DFlash, JetSpec": {},
}

# DSpark of DeepSeek's trainer; `markov_rank` 0 is anchor-first DFlash.
_OF_DEEPSPEC = {
    **_COMMON,
    **_TRUNK,
    **_MARKOV,
    "target_tap_layers": taps({"target_layer_ids": 1, "dspark_target_layer_ids": 1}, least=-1),
    "markov_rank": rows.nested("markov_rank"),
    "sample_from_anchor": rows.anchor_first(True),
    "sights": lambda files, _: tuple(map(rows.reaching, rows.windows_of(files))),
    "rope": _ROPE,
    "confidence_head": rows.confidence(False),
}


def _is_dflash(checkpoint: AnyCheckpoint, title: str) -> bool:
    """Whether these are files of a member of `_HEADS_OF_DFLASH`; the last one takes all."""
    names, own = checkpoint.shapes, checkpoint.config.get(rows.OWN)
    if speculators_type(checkpoint) or not (own is not None or {"fc.weight", "hidden_norm.weight"} <= names.keys()):
        return False
    if title == "z-lab DFlash2":
        return any(name.startswith("candidate_selector.") for name in names)
    projector = own.get("projector_type") if isinstance(own, dict) else None
    if projector is None:
        written_by, heads = str(checkpoint.config.get("architectures")), ("markov_head.markov_w1.", "markov_w1.")
        is_dspark = "DSpark" in written_by or any(name.startswith(heads) for name in names)
        projector = "domino" if "Domino" in written_by else "dspark" if is_dspark else "dflash"
    return not title.startswith("SpecForge") or f"SpecForge {projector}".lower() == title.lower()


def _is_deepspec(checkpoint: AnyCheckpoint, gemma: bool = False) -> bool:
    """Whether a checkpoint is DSpark in DeepSpec's format; SpecForge's has a dflash_config."""
    names = str(checkpoint.config.get("architectures"))
    others = speculators_type(checkpoint) or rows.OWN in checkpoint.config
    of_gemma = not gemma or "Gemma4DSparkModel" in names
    return not others and of_gemma and ("DSpark" in names or "markov_rank" in checkpoint.config)


_SELECTOR = "candidate_selector."
_CODEBOOKS = {
    f"{_SELECTOR}{each}_codebook": (f"{_SELECTOR}{each}_codebook.weight",) for each in ("predecessor", "successor")
}
# Names that vLLM knows beside ours
_OF_VLLM = {
    "fc.weight": ("fc.weight", "encoder.fc.weight"),
    "hidden_norm.weight": ("hidden_norm.weight", "encoder.output_norm_enc.weight"),
    "layers.0.": ("layers.0.", "midlayer."),
}
_OF_MODELOPT = {
    "markov_head.": ("markov_head.", ""),
    "confidence_head.proj.": ("confidence_head.proj.", "confidence_proj."),
}
_IGNORED, _GIVEN = (*FOREIGN["of block drafters"], *rows.STORED), {"mask_token_id": 0}

FORMATS = (
    *(
        speculators(
            kind,
            BlockDrafter,
            {**_OF_SPECULATORS, **heads},
            with_defaults=("qwen3",),
            ignored=rows.STORED,
            converted=rows.converted,
            open=_OPEN_IN_SPECULATORS.get(kind, _ROTATION),
        )
        for kind, heads in _HEADS_OF_SPECULATORS.items()
    ),
    PublishedFormat(
        "DeepSpec DSpark of Gemma 4",
        19,
        partial(_is_deepspec, gemma=True),
        BlockDrafter,
        {
            **_OF_DEEPSPEC,
            "sizes": gemma_sizes,
            "sights": (),
            "rope": rope("full_attention"),
            "embedding_scale": None,
            **same("final_logit_softcapping", default=OURS),
        },
        ignored=("num_anchors", "attention_k_eq_v"),
        expected=OF_GEMMA,
    ),
    PublishedFormat(
        "DeepSpec DSpark",
        20,
        _is_deepspec,
        BlockDrafter,
        _OF_DEEPSPEC,
        ignored=_IGNORED,
        tensors=_OF_MODELOPT,
        converted=rows.converted,
        open=_ROTATION,
        given=_GIVEN,
        expected={"model_type": _COPIED},
    ),
    PublishedFormat(
        "transformers DFlash",  # an assistant of Muse Glimmer
        30,
        lambda checkpoint: checkpoint.config.get("model_type") == _ASSISTANT,
        BlockDrafter,
        {
            **_COMMON,
            **_TRUNK,
            "vocab_size": None,
            "draft_vocab_size": None,
            "num_input_tokens": None,
            "target_tap_layers": taps({"target_layer_ids": 1}),
            "sample_from_anchor": False,
            "sights": lambda files, _: tuple(map(rows.sight, rows.windows_of(files))),
            "rope": _ROPE,
            "embedding_scale": None,
            "last_tap_is_normed": True,
        },
        with_defaults=(_ASSISTANT,),
        tensors={"fc.weight": ("encoder.fc.weight",), "hidden_norm.weight": ("encoder.output_norm_enc.weight",)},
    ),
    *(
        PublishedFormat(
            title,
            40 + index,
            partial(_is_dflash, title=title),
            BlockDrafter,
            {**_OF_DFLASH, **heads},
            checked=(rows.OWN,),
            ignored=_IGNORED,
            converted=rows.converted,
            expected={f"{rows.OWN}.projector_type": ("dflash", "dflash2", "dspark", "domino")},
            tensors={**_CODEBOOKS, **_OF_MODELOPT, **_OF_VLLM, "domino.": ("logit_head.", "")},
            open=_OPEN_IN_DFLASH,
            given=_GIVEN,
        )
        for index, (title, heads) in enumerate(_HEADS_OF_DFLASH.items())
    ),
)

# Relatives that compute something else, by a part of a name in config.json
_OTHERS = {
    "lilicorr": "LiLiCorr, which scores candidates by a network over all pairs of them",
    "dflare": "DFlare, whose layers read different hidden states",
    "laguna": "Laguna's DFlash, whose attention has gates and whose context is normed by layer",
    "clover": "Clover, whose heads are recurrent layers over the target's last hidden state",
    "k3dspark": "Kimi K3's DSpark, whose attention is multi-head latent (MLA)",
    "deepseek_v4": "DeepSeek V4's DSpark, whose layers have several streams",
    "kv_a_proj": "a block drafter whose attention is multi-head latent (MLA)",  # a tensor
}


def _why_other(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """Returns which of `_OTHERS` a drafter is, and the field or tensor that tells it; an empty string for none."""
    table = config.get(rows.OWN)
    own = table if isinstance(table, dict) else {}
    fields = {name: config.get(name) for name in ("architectures", "model_type")}
    fields |= {name: own.get(name) for name in own if name == "projector_type" or name.startswith("lilicorr")}
    fields |= {name: shape for name, shape in shapes.items() if table is not None and "kv_a_proj" in name}
    for key, what in _OTHERS.items():
        for name, value in fields.items():
            if key in f"{name} {value}".lower():
                return (
                    f"is {what} ({printable(f'{name}={value!r}', 200)}): that is not drafted with here; expected "
                    "DFlash, DFlash2, DSpark, Domino or JetSpec (projector_type dflash, dflash2, dspark or domino)"
                )
    return ""


for _form in FORMATS:
    _form.register()
register_refusal(
    "other block drafters",
    15,
    lambda checkpoint: _why_other(checkpoint.config, checkpoint.shapes),
    lambda config: rows.OWN in config or bool(_why_other(config, {})),
)
