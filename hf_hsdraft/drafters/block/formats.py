"""Published formats of block drafters, as tables."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...core.fields import Fields
from ...hub.checkpoint import LOOSE_MASK, Checkpoint
from ...hub.drafter_files import CONFIG
from ...hub.speculators_format import speculators_type
from ..base.decoder_layer import LayerSizes
from ..base.published_config import MOST_LAYERS
from ..base.published_format import (
    OURS,
    REQUIRED,
    Files,
    PublishedFormat,
    Row,
    read_windows,
    rope,
    same,
    sizes,
    speculators,
    taps,
    told,
)
from .configuration import Sight
from .drafter import BlockDrafter

# DeepSpec starts from a copy of the target's configuration, of any type, and builds Qwen3 layers from it.
_COPIED = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text")
_OWN = "dflash_config"  # fields that it lacks may be at the top
_ASSISTANT = "muse_glimmer_assistant"


def _own(name: str, default: Any = REQUIRED) -> Row:
    return told(f"{_OWN}.{name}", name, default=default)


def _taps(files: Files, each: Any) -> tuple[int, ...]:
    place = f"{_OWN}." if "target_layer_ids" in files.table(_OWN) else ""
    return taps({f"{place}target_layer_ids": 1})(files, each)


def _sizes(files: Files, _: Any) -> LayerSizes:
    """Sizes of Qwen3's layers, whatever the tensors."""
    bias = files.layers.flag("attention_bias", False)
    return sizes(files, attention_bias=bias, output_bias=bias, qk_norm=True)


def _windows(files: Files) -> tuple[int | None, ...]:
    return read_windows(files.layers, files.layers.integer("num_hidden_layers", most=MOST_LAYERS))


def _sight(window: int | None, of_anchor: bool = False, causal: bool = False) -> Sight:
    """Without a window, a layer sees all of a block, unless its format says otherwise."""
    return Sight(None, False, causal and not of_anchor) if window is None else Sight(window, of_anchor, causal)


def _reaching(window: int | None, causal: bool = False) -> Sight:
    """As `_sight`, of a window that counts the slot itself."""
    return _sight(None if window is None else window - 1, causal=causal)


def _of_anchor(default: bool) -> Row:
    """The row of `sights` in speculators' formats; `default` is whether slots in windows see later ones."""

    def row(files: Files, _: Any) -> tuple[Sight, ...]:
        causal = not files.top.flag("sliding_window_non_causal", default)
        return tuple(_sight(window, of_anchor=True, causal=causal) for window in _windows(files))

    return row


def _of_zlab(files: Files, _: Any) -> tuple[Sight, ...]:
    """The sights of z-lab and of those who follow it."""
    own, top, windows, causal = files.table(_OWN), files.top, _windows(files), _causal(files)
    if own.flag("use_swa", False):
        window = own.integer("swa_window_size")
        if window != top.integer("sliding_window", window):
            raise ValueError(f"swa_window_size={window} in dflash_config is invalid: expected the same sliding_window")
        windows = windows if "layer_types" in top else (window,) * len(windows)
    return tuple(_reaching(window, window is not None if causal is None else causal) for window in windows)


def _causal(files: Files) -> bool | None:
    """Whether a slot sees no later slot, in any layer; None if that is not told. `causal_head` is JetSpec's."""
    places = {"causal": files.table(_OWN), "causal_head": files.table(_OWN), "is_causal": files.top}
    found = {name: flag for name, table in places.items() if (flag := table.flag(name, None)) is not None}
    if len(set(found.values())) > 1:
        named = " and ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"{named} in {CONFIG} contradict each other")
    return next(iter(found.values()), None)


def _confidence(default: bool) -> Row:
    """The row of `confidence_head` by switches with a default."""

    def row(files: Files, _: Any) -> str:
        with_markov = files.top.flag("confidence_head_with_markov", default)
        return ("markov" if with_markov else "hidden") if files.top.flag("enable_confidence_head", default) else "none"

    return row


def _shown_confidence(files: Files, _: Any) -> str:
    """Whether there is a confidence head, and its input, as its tensor shows."""
    shape = files.shape("confidence_head.proj.weight")
    if shape is None:
        return "none"
    return "hidden" if shape[-1] == files.top.integer("hidden_size") else "markov"


def _gemma_sizes(files: Files, _: Any) -> LayerSizes:
    """Sizes of layers like the full ones of Gemma 4, whose fields are ambiguous if heads differ by type."""
    first = "layers.0.self_attn."
    [head_dim], [keys, _] = files.shape(f"{first}q_norm.weight") or (0,), files.shape(f"{first}k_proj.weight") or (0, 0)
    top, own = files.top, {"head_dim": head_dim, "num_key_value_heads": keys // max(head_dim, 1)}
    own["hidden_act"] = top.values.get("hidden_activation", "gelu_pytorch_tanh")
    layer = Fields({**top.values, **own}, CONFIG)
    return sizes(files, layer=layer, gemma=True, keys_are_values=files.shape(f"{first}v_proj.weight") is None)


def _learned_mask(files: Files, _: Any) -> bool:
    return (files.checkpoint.folder / LOOSE_MASK).is_file()


_COMMON = {"learned_mask": _learned_mask, **same("mask_token_id")}
_TRUNK = {
    **same("vocab_size", "num_hidden_layers", "block_size"),
    "draft_vocab_size": told("vocab_size"),
    "target_hidden_size": told("hidden_size"),
    "sizes": _sizes,
    "target_num_hidden_layers": told("num_target_layers", default=None),
}
_MARKOV = same("markov_head_type", default=OURS)
_SIZES_OF_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
# If rope differs by layer type, all layers use that of sliding ones.
_ROPE = rope("sliding_attention")

_OF_SPECULATORS = {
    **_COMMON,
    "target_tap_layers": taps({"aux_hidden_state_layer_ids": 0}),
    "sizes": _sizes,
    **same("block_size", default=8),
    **same("sample_from_anchor", default=False),
    "sights": _of_anchor(False),
    "rope": _ROPE,
    # Only this package writes it, for drafters in z-lab's format.
    "embedding_scale": lambda files, _: None if files.top.flag("target_scales_embeddings", False) else 1.0,
}
_HEADS_OF_SPECULATORS = {
    "dflash": {},
    "dflash2": {
        "sights": _of_anchor(True),
        **{name: told(name, default=usual) for name, usual in _SIZES_OF_DFLASH2.items()},
    },
    "dspark": {
        **_MARKOV,
        **same("sample_from_anchor", default=True),
        **same("markov_rank", default=256),
        "confidence_head": _confidence(True),
    },
}

_OF_DFLASH = {
    **_COMMON,
    **_TRUNK,
    "target_tap_layers": _taps,
    "target_num_hidden_layers": _own("num_target_layers", None),
    "block_size": _own("block_size", 16),
    "mask_token_id": _own("mask_token_id"),
    "sample_from_anchor": False,
    "sights": _of_zlab,
    "rope": _ROPE,
    # Embeddings have the target's factor, if any.
    "embedding_scale": _own("input_embedding_scale", None),
    **{name: _own(name, OURS) for name in ("output_multiplier", "final_logit_softcapping")},
    "last_tap_is_normed": True,
}
_HEADS_OF_DFLASH = {
    "SpecForge DSpark": {
        "sample_from_anchor": told(f"{_OWN}.shift_label", default=True),
        "markov_rank": _own("markov_rank", 0),
        "markov_head_type": _own("markov_head_type", OURS),
        "confidence_head": _shown_confidence,
    },
    "SpecForge Domino": {
        "sample_from_anchor": told(f"{_OWN}.shift_label", default=False),
        "domino_rank": _own("emb_dim"),
        "gru_size": _own("gru_hidden_dim"),
        "free_depths": _own("pure_draft_prefix_len", 0),  # the first slots that draft go without it
    },
    "z-lab DFlash2": {name: _own(name) for name in _SIZES_OF_DFLASH2},
    "z-lab DFlash, JetSpec": {},
}

# DSpark of DeepSeek's trainer; `markov_rank` 0 is anchor-first DFlash.
_OF_DEEPSPEC = {
    **_COMMON,
    **_TRUNK,
    **_MARKOV,
    "target_tap_layers": taps({"target_layer_ids": 1}, least=-1),
    **same("markov_rank"),
    **same("sample_from_anchor", default=True),
    "sights": lambda files, _: tuple(map(_reaching, _windows(files))),
    "rope": rope("sliding_attention", whole_heads=True),
    "confidence_head": _confidence(False),
}


def _is_dflash(checkpoint: Checkpoint, title: str) -> bool:
    """Whether these are files of a member of `_HEADS_OF_DFLASH`; the last one takes all."""
    names, own = checkpoint.shapes, checkpoint.config.get(_OWN)
    if speculators_type(checkpoint) or not (own is not None or {"fc.weight", "hidden_norm.weight"} <= names.keys()):
        return False
    if title == "z-lab DFlash2":
        return any(name.startswith("candidate_selector.") for name in names)
    projector = own.get("projector_type") if isinstance(own, dict) else None
    return not title.startswith("SpecForge") or f"SpecForge {projector}".lower() == title.lower()


def _is_deepspec(checkpoint: Checkpoint, gemma: bool = False) -> bool:
    """Whether a checkpoint is DSpark in DeepSpec's format; SpecForge's has a dflash_config."""
    names = str(checkpoint.config.get("architectures"))
    others = speculators_type(checkpoint) or _OWN in checkpoint.config
    of_gemma = not gemma or "Gemma4DSparkModel" in names
    return not others and of_gemma and ("DSpark" in names or "markov_rank" in checkpoint.config)


_SELECTOR = "candidate_selector."
_CODEBOOKS = {
    f"{_SELECTOR}{each}_codebook": (f"{_SELECTOR}{each}_codebook.weight",) for each in ("predecessor", "successor")
}

FORMATS = (
    *(
        speculators(kind, BlockDrafter, {**_OF_SPECULATORS, **heads}, with_defaults=("qwen3",))
        for kind, heads in _HEADS_OF_SPECULATORS.items()
    ),
    PublishedFormat(
        "DeepSpec DSpark of Gemma 4",
        19,
        partial(_is_deepspec, gemma=True),
        BlockDrafter,
        {
            **_OF_DEEPSPEC,
            "sizes": _gemma_sizes,
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
        ignored=("num_anchors", "attn_output_gate", "norm_topk_prob"),
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
            "target_tap_layers": taps({"target_layer_ids": 1}),
            "sample_from_anchor": False,
            "sights": lambda files, _: tuple(map(_sight, _windows(files))),
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
            checked=(_OWN,),
            ignored=("enable_confidence_head", "confidence_head_with_markov"),  # the tensors decide
            expected={f"{_OWN}.projector_type": ("dflash", "dflash2", "dspark", "domino")},
            tensors={**{name: (f"{name}.weight",) for name in _CODEBOOKS}, "domino.": ("logit_head.", "")},
        )
        for index, (title, heads) in enumerate(_HEADS_OF_DFLASH.items())
    ),
)

for _form in FORMATS:
    _form.register()
