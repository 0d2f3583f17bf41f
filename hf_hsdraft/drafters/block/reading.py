"""Reads configurations of published block drafters.

Formats number the target's layers differently. Here tap k is `hidden_states[k]` of transformers: 0 is the embeddings, k
the output of layer k. In a list of layers from 0, layer i is tap i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING

from ...core.checks import few, printable
from ...core.fields import REQUIRED, Fields
from ...hub.checkpoint import LOOSE_MASK, Checkpoint
from ...hub.drafter_files import CONFIG
from ...hub.speculators_format import check_proposals, speculators_type, target_of
from ..base.layer_fields import read_rope, read_sizes, read_windows
from ..base.plain_config import most_of
from .configuration import MARKOV_HEADS, MOST_RANK, BlockConfig, Sight

_SPECULATORS = ("dflash", "dflash2", "dspark")
# Fields of transformers that do not affect what a drafter computes.
_MEANINGLESS = ("is_decoder", "return_dict", "tie_word_embeddings", "use_cache", "use_sliding_window")
# DeepSpec starts from a copy of the target's configuration, of any type, and builds Qwen3 layers from it.
_COPIED = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text")
_OF_COPIES = ("attn_output_gate", "norm_topk_prob")


def read_speculators(checkpoint: Checkpoint) -> BlockConfig:
    """Reads DFlash, DFlash2 or DSpark in the format of the speculators package."""
    kind = speculators_type(checkpoint)
    config = Fields(checkpoint.config, CONFIG)
    check_proposals(config)
    given = config.table("transformer_layer_config")
    layer = _with_defaults(given.values, given.place)
    layer.ignore(*_MEANINGLESS)
    causal = not config.flag("sliding_window_non_causal", kind == "dflash2")
    target_name, target_architectures = target_of(checkpoint.config)
    fields = {
        **_trunk(layer),
        "target_hidden_size": config.integer("target_hidden_size", None) or layer.integer("hidden_size"),
        "target_tap_layers": tuple(config.integers("aux_hidden_state_layer_ids")),
        "block_size": _size(config, "block_size", 8),
        "sample_from_anchor": config.flag("sample_from_anchor", kind == "dspark"),
        "mask_token_id": config.integer("mask_token_id", least=0),
        "draft_vocab_size": _size(config, "draft_vocab_size", 32000),
        "sights": tuple(_sight(window, of_anchor=True, causal=causal) for window in _windows(layer)),
        # Only this package writes it, for drafters in z-lab's format.
        "embedding_scale": None if config.flag("target_scales_embeddings", False) else 1.0,
        "last_tap_is_normed": False,
        "target_name": target_name,
        "target_architectures": target_architectures,
        **(_dspark_heads(config, 256, enabled=True) if kind == "dspark" else {}),
        **(_dflash2_heads(config, least_known=True) if kind == "dflash2" else {}),
    }
    return _complete(fields, checkpoint, layer, config)


def read_dflash(checkpoint: Checkpoint) -> BlockConfig:
    """Reads z-lab's DFlash or DFlash2, SpecForge's DSpark or Domino, or JetSpec.

    Embeddings have the target's factor, if any.
    """
    config = Fields(checkpoint.config, CONFIG)
    own = config.table("dflash_config", None) or Fields({}, f"{CONFIG}, dflash_config")
    projector = own.choice("projector_type", ("dflash", "dflash2", "dspark", "domino"), "dflash")
    dspark, domino = projector == "dspark", projector == "domino"
    config.ignore(*_MEANINGLESS, "num_target_layers")
    both = Fields({**config.values, **{name: value for name, value in own.values.items() if value is not None}}, CONFIG)
    causal, windows = _causal(own, config), _windows(config)
    if own.flag("use_swa", False):
        window = own.integer("swa_window_size")
        if window != config.integer("sliding_window", window):
            raise ValueError(f"swa_window_size={window} in dflash_config is invalid: expected the same sliding_window")
        windows = windows if "layer_types" in config else (window,) * len(windows)
    is_second = any(name.startswith("candidate_selector.") for name in checkpoint.shapes)
    fields = {
        **_trunk(config),
        **_block(both, block_size=16),
        "sample_from_anchor": (dspark or domino) and own.flag("shift_label", dspark),
        "sights": tuple(_reaching(window, window is not None if causal is None else causal) for window in windows),
        "embedding_scale": both.number("input_embedding_scale", None),
        "output_multiplier": both.number("output_multiplier", 1.0),
        "final_logit_softcapping": both.number("final_logit_softcapping", 0.0, least=-1.0),
        **(_dflash2_heads(both) if is_second else {}),
        **(_dspark_of(both, checkpoint) if dspark else {}),
        **(_domino_head(both) if domino else {}),
    }
    own.ignore("enable_confidence_head", "confidence_head_with_markov")  # the tensors decide
    return _complete(fields, checkpoint, own, config)


def read_deepspec(checkpoint: Checkpoint) -> BlockConfig:
    """Reads DSpark in the format of DeepSpec, DeepSeek's trainer; `markov_rank` 0 is anchor-first DFlash."""
    config = Fields(checkpoint.config, CONFIG)
    config.choice("model_type", _COPIED, "qwen3")
    config.ignore(*_MEANINGLESS, *_OF_COPIES, "num_anchors")
    fields = {
        **_trunk(config, whole_heads=True),
        **_of_deepspec(config),
        "sights": tuple(_reaching(window) for window in _windows(config)),
    }
    return _complete(fields, checkpoint, config)


def read_gemma_dspark(checkpoint: Checkpoint) -> BlockConfig:
    """Reads DeepSpec's DSpark for Gemma 4: layers like the target's full ones, from a copy of its configuration."""
    config, shapes = Fields(checkpoint.config, CONFIG), checkpoint.shapes
    config.choice("model_type", ("gemma4_text", "gemma4_unified_text"), "gemma4_text")
    config.ignore(*_MEANINGLESS, "num_anchors", "attention_k_eq_v", "attention_bias")
    for name in ("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input"):
        config.expect(name, False, 0)
    # If heads differ by layer type, the copied fields are ambiguous; the tensors are those of full layers.
    first = "layers.0.self_attn."
    [head_dim], [keys, _] = shapes.get(first + "q_norm.weight", (0,)), shapes.get(first + "k_proj.weight", (0, 0))
    own = {**config.values, "head_dim": head_dim, "num_key_value_heads": keys // max(head_dim, 1)}
    own["hidden_act"] = config.values.get("hidden_activation", "gelu_pytorch_tanh")
    bias = f"{first}q_proj.bias" in shapes
    sizes = read_sizes(Fields(own, CONFIG), attention_bias=bias, output_bias=bias, qk_norm=True)
    vocabulary = _size(config, "vocab_size")
    fields = {
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "sizes": replace(sizes, gemma=True, keys_are_values=f"{first}v_proj.weight" not in shapes),
        "num_hidden_layers": _size(config, "num_hidden_layers"),
        "rope": read_rope(config, "full_attention"),
        **_of_deepspec(config),
        "embedding_scale": None,
        "final_logit_softcapping": config.number("final_logit_softcapping", 0.0),
    }
    return _complete(fields, checkpoint, config)


def read_transformers(checkpoint: Checkpoint) -> BlockConfig:
    """Reads transformers' DFlash drafter, a Muse Glimmer assistant."""
    config = _with_defaults(checkpoint.config, CONFIG, "muse_glimmer_assistant")
    config.ignore(*_MEANINGLESS)
    fields = {
        **_trunk(config, has_vocabulary=False),
        **_block(config),
        "sample_from_anchor": False,
        "sights": tuple(_sight(window) for window in _windows(config)),
        "embedding_scale": None,
    }
    return _complete(fields, checkpoint, config)


def _causal(own: Fields, config: Fields) -> bool | None:
    """Reads whether a slot sees no later slot, in any layer; None if that is not told. `causal_head` is JetSpec's."""
    told = {name: own.flag(name, None) for name in ("causal", "causal_head")}
    told["is_causal"] = config.flag("is_causal", None)
    known = {name: value for name, value in told.items() if value is not None}
    if len(set(known.values())) > 1:
        found = " and ".join(f"{name}={value}" for name, value in known.items())
        raise ValueError(f"{found} in {CONFIG} contradict each other")
    return next(iter(known.values()), None)


def _complete(fields: Mapping[str, Any], checkpoint: Checkpoint, *read: Fields) -> BlockConfig:
    """Returns the configuration; a file with a mask embedding says that there is one."""
    for each in read:
        each.refuse_unread()
    return BlockConfig(**fields, learned_mask=(checkpoint.folder / LOOSE_MASK).is_file())


def _size(fields: Fields, name: str, default: Any = REQUIRED) -> Any:
    return fields.integer(name, default, most=most_of(BlockConfig, name))


def _block(config: Fields, least: int = 0, block_size: Any = REQUIRED) -> dict[str, Any]:
    """Reads the layout of a block and the layers of the target, from `least` on: layer -1 is the embeddings."""
    return {
        "target_hidden_size": config.integer("hidden_size"),
        "target_tap_layers": tuple(layer + 1 for layer in config.integers("target_layer_ids", least=least)),
        "block_size": _size(config, "block_size", block_size),
        "mask_token_id": config.integer("mask_token_id", least=0),
        "target_num_hidden_layers": config.integer("num_target_layers", None, most=4096),
    }


def _of_deepspec(config: Fields) -> dict[str, Any]:
    return {
        **_block(config, least=-1),
        "sample_from_anchor": config.flag("sample_from_anchor", True),
        "last_tap_is_normed": False,
        **_dspark_heads(config, REQUIRED, enabled=False),
    }


def _trunk(layer: Fields, has_vocabulary: bool = True, whole_heads: bool = False) -> dict[str, Any]:
    """Reads sizes of layers in Qwen3's names, and of the vocabulary if there is one."""
    bias = layer.flag("attention_bias", False)
    size = _size(layer, "vocab_size") if has_vocabulary else None
    return {
        "vocab_size": size,
        "draft_vocab_size": size,
        "sizes": read_sizes(layer, attention_bias=bias, output_bias=bias, qk_norm=True),
        "num_hidden_layers": _size(layer, "num_hidden_layers"),
        # If rope differs by layer type, all layers use that of sliding ones.
        "rope": read_rope(layer, "sliding_attention", whole_heads),
    }


def _windows(layer: Fields) -> tuple[int | None, ...]:
    """Reads the sliding window of each layer; without `layer_types`, derives it as Qwen3's configuration does."""
    count, kinds = _size(layer, "num_hidden_layers"), layer.values.get("layer_types")
    if kinds is None:
        slides = layer.flag("use_sliding_window", False) and "sliding_window" in layer
        first = layer.integer("max_window_layers", 28, least=0) if slides else count
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    return read_windows(layer, kinds, count)


def _sight(window: int | None, of_anchor: bool = False, causal: bool = False) -> Sight:
    """Without a window, a layer sees all of a block, unless its format says otherwise."""
    return Sight(None, False, causal and not of_anchor) if window is None else Sight(window, of_anchor, causal)


def _reaching(window: int | None, causal: bool = False) -> Sight:
    """As `_sight`, of a window that counts the slot itself."""
    return _sight(None if window is None else window - 1, causal=causal)


def _dspark_heads(config: Fields, rank: Any, enabled: bool) -> dict[str, Any]:
    """Reads DSpark's heads; `rank` is the default of the rank, `enabled` of the confidence head's switches."""
    with_markov = config.flag("confidence_head_with_markov", enabled)
    confidence = ("markov" if with_markov else "hidden") if config.flag("enable_confidence_head", enabled) else "none"
    return _heads(config, rank, confidence)


def _dspark_of(config: Fields, checkpoint: Checkpoint) -> dict[str, Any]:
    """Reads DSpark's heads; the tensors show whether there is a confidence head, and its input."""
    shape = checkpoint.shapes.get("confidence_head.proj.weight")
    if shape is None:
        return _heads(config, 0, "none")
    return _heads(config, 0, "hidden" if shape[-1] == config.integer("hidden_size") else "markov")


def _heads(config: Fields, rank: Any, confidence: str) -> dict[str, Any]:
    return {
        "markov_rank": config.integer("markov_rank", rank, least=0, most=MOST_RANK),
        "markov_head_type": config.choice("markov_head_type", MARKOV_HEADS, "vanilla"),
        "confidence_head": confidence,
    }


def _domino_head(config: Fields) -> dict[str, Any]:
    """Reads Domino's head; the first slots that draft, `pure_draft_prefix_len` many, go without it."""
    return {
        "domino_rank": config.integer("emb_dim", most=MOST_RANK),
        "gru_size": config.integer("gru_hidden_dim", most=most_of(BlockConfig, "gru_size")),
        "free_depths": config.integer("pure_draft_prefix_len", 0, least=0, most=256),
    }


def _dflash2_heads(config: Fields, least_known: bool = False) -> dict[str, Any]:
    """Reads convolutions and selector of DFlash2; `least_known` gives missing sizes the usual values."""
    usual = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    return {name: _size(config, name, value if least_known else REQUIRED) for name, value in usual.items()}


def _with_defaults(values: Mapping[str, Any], place: str, model_type: str = "qwen3") -> Fields:
    """Fills in the defaults of the configuration class, which files leave out.

    Switches at their default were not set by the drafter, and need no reader.
    """
    kind = values.get("model_type", model_type)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        known = "a model_type of transformers, such as qwen3"
        raise ValueError(f"model_type={printable(kind)} in {place} is invalid: expected {known}")
    defaults = CONFIG_MAPPING[kind]().to_dict()
    derived = {"layer_types", "rope_parameters", "sliding_window"}
    kept = {name: value for name, value in defaults.items() if name not in derived}
    if defaults.get("rope_parameters") and not {"rope_parameters", "rope_theta"} & values.keys():
        kept["rope_parameters"] = defaults["rope_parameters"]
    fields = Fields({**kept, "sliding_window": defaults.get("sliding_window"), **values}, place)
    fields.ignore(*(name for name, value in fields.values.items() if name in defaults and defaults[name] == value))
    return fields


def refuse(checkpoint: Checkpoint, **_: Any) -> Any:
    """Raises a ValueError that says why a drafter of a related format cannot be loaded."""
    names = checkpoint.shapes
    laguna = [name for name in names if "aux_hidden_norms" in name or ".g_proj." in name]
    if any(name.startswith("mtp.") for name in names):
        reason = "DSpark blocks inside a DeepSeek-V4 target, which keep several streams of states"
    else:
        reason = f"a Laguna drafter, whose {few(laguna, 2)} change what its layers compute"
    raise ValueError(f"{printable(checkpoint.name)} is {reason}: this is not known here; expected DFlash or DSpark")


def is_refused(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a related, unsupported format."""
    return any(
        name.startswith("aux_hidden_norms.")
        or ".self_attn.g_proj." in name
        or (name.startswith("mtp.") and ".markov_head." in name)
        for name in checkpoint.shapes
    )


def is_speculators(checkpoint: Checkpoint) -> bool:
    return speculators_type(checkpoint) in _SPECULATORS


def is_deepspec(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is DSpark in DeepSpec's format; SpecForge's matches DFlash."""
    names = checkpoint.config.get("architectures")
    by_name = isinstance(names, list) and any("DSpark" in str(name) for name in names)
    others = speculators_type(checkpoint) or "dflash_config" in checkpoint.config
    return not others and (by_name or "markov_rank" in checkpoint.config)


def is_gemma_dspark(checkpoint: Checkpoint) -> bool:
    return is_deepspec(checkpoint) and "Gemma4DSparkModel" in str(checkpoint.config.get("architectures"))


def is_transformers(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "muse_glimmer_assistant"


def is_dflash(checkpoint: Checkpoint) -> bool:
    if speculators_type(checkpoint):
        return False
    known = {"fc.weight", "hidden_norm.weight"} <= checkpoint.shapes.keys()
    return "dflash_config" in checkpoint.config or known
