"""Published formats of block drafters, as tables."""

from __future__ import annotations

from functools import partial

from ...hub.checkpoint import Checkpoint
from ...hub.speculators_format import speculators_type
from ..base.published_format import OURS, PublishedFormat, rope, same, shown, speculators, taps, told
from .drafter import BlockDrafter
from .rows import (
    OWN,
    STORED,
    anchor_first,
    block_rope,
    block_sizes,
    confidence,
    converted,
    gemma_sizes,
    input_tokens,
    learned_mask,
    mask_token,
    may_read_last,
    multiplier,
    nested,
    of_anchor,
    output_tokens,
    reaching,
    rotates_in_part,
    shown_confidence,
    sight,
    sights_of_dflash,
    taps_of_dflash,
    tokens,
    windows_of,
)

# DeepSpec starts from a copy of the target's configuration, of any type, and builds Qwen3 layers from it.
_COPIED = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text")
_ASSISTANT = "muse_glimmer_assistant"


_COMMON = {
    "output_multiplier": multiplier,
    "learned_mask": learned_mask,
    "mask_token_id": mask_token,
    "rotates_whole_heads": rotates_in_part,
    "own_embedding": shown("embed_tokens.weight"),
    "own_head": shown("lm_head.weight"),
}
_TRUNK = {
    **same("num_hidden_layers"),
    "vocab_size": tokens,
    "draft_vocab_size": output_tokens,
    "num_input_tokens": input_tokens,
    "block_size": nested("block_size"),
    "target_hidden_size": told("target_hidden_size", "hidden_size"),
    "sizes": block_sizes,
    "target_num_hidden_layers": told("num_target_layers", default=None),
}
_MARKOV = same("markov_head_type", default=OURS)
_SIZES_OF_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_ROTATION = {"rotates_whole_heads": rotates_in_part}
_OPEN_IN_DFLASH = {
    **_ROTATION,
    "embedding_scale": (f"{OWN}.input_embedding_scale", "input_embedding_scale"),
    "last_tap_is_normed": may_read_last,
}
_OPEN_IN_SPECULATORS = {"dspark": {**_ROTATION, "sample_from_anchor": ("sample_from_anchor",)}}

_OF_SPECULATORS = {
    **_COMMON,
    "target_tap_layers": taps({"aux_hidden_state_layer_ids": 0}),
    "sizes": block_sizes,
    **same("block_size", default=8),
    **same("sample_from_anchor", default=False),
    "sights": of_anchor(False),
    "rope": block_rope,
    # Only this package writes it, for drafters in z-lab's format.
    "embedding_scale": lambda files, _: None if files.top.flag("target_scales_embeddings", False) else 1.0,
}
_HEADS_OF_SPECULATORS = {
    "dflash": {},
    "dflash2": {
        "sights": of_anchor(True),
        **{name: told(name, default=usual) for name, usual in _SIZES_OF_DFLASH2.items()},
    },
    "dspark": {
        **_MARKOV,
        **same("sample_from_anchor", default=True),
        **same("markov_rank", default=256),
        "confidence_head": confidence(True),
    },
}

_OF_DFLASH = {
    **_COMMON,
    **_TRUNK,
    "target_tap_layers": taps_of_dflash,
    "target_num_hidden_layers": nested("num_target_layers", None),
    "block_size": nested("block_size", 16),
    "sample_from_anchor": anchor_first(False),
    "sights": sights_of_dflash,
    "rope": block_rope,
    # Embeddings have the target's factor, if any.
    "embedding_scale": nested("input_embedding_scale", None),
    "final_logit_softcapping": nested("final_logit_softcapping", OURS),
    "last_tap_is_normed": True,
}
_HEADS_OF_DFLASH = {
    "SpecForge DSpark": {
        "sample_from_anchor": anchor_first(True),
        "markov_rank": nested("markov_rank", 0),
        "markov_head_type": nested("markov_head_type", OURS),
        "confidence_head": shown_confidence,
    },
    "SpecForge Domino": {
        "domino_rank": nested("emb_dim"),
        "gru_size": nested("gru_hidden_dim"),
        "free_depths": nested("pure_draft_prefix_len", 0),  # the first slots that draft go without it
    },
    "z-lab DFlash2": {name: nested(name) for name in _SIZES_OF_DFLASH2},
    "z-lab DFlash, JetSpec": {},
}

# DSpark of DeepSeek's trainer; `markov_rank` 0 is anchor-first DFlash.
_OF_DEEPSPEC = {
    **_COMMON,
    **_TRUNK,
    **_MARKOV,
    "target_tap_layers": taps({"target_layer_ids": 1, "dspark_target_layer_ids": 1}, least=-1),
    "markov_rank": nested("markov_rank"),
    "sample_from_anchor": anchor_first(True),
    "sights": lambda files, _: tuple(map(reaching, windows_of(files))),
    "rope": rope("sliding_attention", whole_heads=True),
    "confidence_head": confidence(False),
}


def _is_dflash(checkpoint: Checkpoint, title: str) -> bool:
    """Whether these are files of a member of `_HEADS_OF_DFLASH`; the last one takes all."""
    names, own = checkpoint.shapes, checkpoint.config.get(OWN)
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


def _is_deepspec(checkpoint: Checkpoint, gemma: bool = False) -> bool:
    """Whether a checkpoint is DSpark in DeepSpec's format; SpecForge's has a dflash_config."""
    names = str(checkpoint.config.get("architectures"))
    others = speculators_type(checkpoint) or OWN in checkpoint.config
    of_gemma = not gemma or "Gemma4DSparkModel" in names
    return not others and of_gemma and ("DSpark" in names or "markov_rank" in checkpoint.config)


_SELECTOR = "candidate_selector."
_CODEBOOKS = {
    f"{_SELECTOR}{each}_codebook": (f"{_SELECTOR}{each}_codebook.weight",) for each in ("predecessor", "successor")
}
_OF_MODELOPT = {
    "markov_head.": ("markov_head.", ""),
    "confidence_head.proj.": ("confidence_head.proj.", "confidence_proj."),
}
# Switches that the tensors tell (DeepSpec, ModelOpt), and those of targets, which classes of DFlash do not read
_TENSORS_TELL = (
    "enable_confidence_head", "confidence_head_with_markov", "use_confidence_head", "has_lm_head", "has_embed_tokens",
    "use_aux_hidden_state", "use_qk_norm", "attention_sink_bias", "add_swa_attention_sink_bias",
    "attn_output_gate", "output_hidden_states", "output_attentions", "output_router_logits", "norm_topk_prob",
)  # fmt: skip
_GIVEN = {"mask_token_id": 0}

FORMATS = (
    *(
        speculators(
            kind,
            BlockDrafter,
            {**_OF_SPECULATORS, **heads},
            with_defaults=("qwen3",),
            ignored=STORED,
            converted=converted,
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
        expected={
            "model_type": ("gemma4_text", "gemma4_unified_text"),
            **dict.fromkeys(("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input"), (False, 0)),
        },
    ),
    PublishedFormat(
        "DeepSpec DSpark",
        20,
        _is_deepspec,
        BlockDrafter,
        _OF_DEEPSPEC,
        ignored=("num_anchors", *_TENSORS_TELL, *STORED),
        tensors=_OF_MODELOPT,
        converted=converted,
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
            "sights": lambda files, _: tuple(map(sight, windows_of(files))),
            "rope": block_rope,
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
            checked=(OWN,),
            ignored=(*_TENSORS_TELL, *STORED),
            converted=converted,
            expected={f"{OWN}.projector_type": ("dflash", "dflash2", "dspark", "domino")},
            tensors={**_CODEBOOKS, **_OF_MODELOPT, "domino.": ("logit_head.", "")},
            open=_OPEN_IN_DFLASH,
            given=_GIVEN,
        )
        for index, (title, heads) in enumerate(_HEADS_OF_DFLASH.items())
    ),
)

for _form in FORMATS:
    _form.register()
