"""Published formats of block drafters, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ...core.checks import is_integer, printable, short
from ...core.fields import Fields
from ...hub.checkpoint import LOOSE_MASK, Checkpoint, speculators_type
from ...hub.drafter_files import CONFIG
from ..base.decoder_layer import LayerSizes
from ..base.published import MOST_LAYERS
from ..base.published_format import (
    FOREIGN,
    OURS,
    REQUIRED,
    Files,
    PublishedFormat,
    Row,
    read_rope,
    read_windows,
    rope,
    same,
    shown,
    sizes,
    speculators,
    taps,
    told,
)
from ..base.registry import Format, register_format
from .configuration import BlockConfig, Sight, rotated_part, spread_layers
from .drafter import BlockDrafter

OWN = "dflash_config"  # fields that it lacks may be at the top


def nested(name: str, default: Any = REQUIRED, *others: str) -> Row:
    """The row of a field that SGLang reads from these places, the first that has it."""
    return told(f"{OWN}.{name}", name, f"dspark_config.{name}", f"dspark_{name}", *others, default=default)


def mask_token(files: Files, each: Any) -> int:
    """The mask token, by all names that vLLM knows, or as the caller says."""
    names = "dspark_noise_token_id", "pard_token", "ptd_token_id"
    found = nested("mask_token_id", files.given.get("mask_token_id"), *names)(files, each)
    if found is None:
        raise ValueError(
            f"{CONFIG} names no mask_token_id: pass mask_token_id=... to from_pretrained. SGLang takes the id of "
            "mask_token, by default '<|MASK|>', in the target's tokenizer"
        )
    return found


def taps_of_dflash(files: Files, each: Any) -> tuple[int, ...]:
    """Layers by all names that vLLM knows; without any, those that z-lab derives from the numbers of layers."""
    names = {f"{OWN}.layer_ids": 0, "dspark_target_layer_ids": 1, "eagle_aux_hidden_state_layer_ids": 0}
    place = f"{OWN}." if "target_layer_ids" in files.table(OWN) else ""
    layers = max(table.integer("num_target_layers", 0, most=4096) for table in (files.table(OWN), files.top))
    usual = spread_layers(layers, files.layers.integer("num_hidden_layers", most=MOST_LAYERS)) if layers else REQUIRED
    return taps({f"{place}target_layer_ids": 1, **names}, usual)(files, each)


def output_tokens(files: Files, each: Any) -> int:
    """The number of tokens with output rows: of a part of the vocabulary, if there is a map of it."""
    return told("draft_vocab_size", "vocab_size")(files, each)


def tokens(files: Files, each: Any) -> int:
    """The size of the target's vocabulary. Without a map, tokens beyond the output rows are inputs only."""
    return told("vocab_size")(files, each) if files.shape("d2t") is not None else output_tokens(files, each)


def input_tokens(files: Files, each: Any) -> int | None:
    """The rows of the tables of tokens that are read, if they are not as many as those of the vocabulary."""
    size, told_size = tokens(files, each), told("vocab_size")(files, each)
    shapes = map(files.shape, ("embed_tokens.weight", "markov_head.markov_w1.weight"))
    rows = next((shape[0] for shape in shapes if shape), size)
    return rows if rows != size and (rows > size or rows == told_size) else None


def anchor_first(default: bool) -> Row:
    """The row of `sample_from_anchor`, which SpecForge and ModelOpt call `shift_label`."""
    return nested("sample_from_anchor", default, f"{OWN}.shift_label")


def rotates_in_part(files: Files, _: Any = None) -> bool:
    """Whether a partial rotary factor is told, which z-lab and speculators ignore and vLLM applies, and no width."""
    layers = files.layers
    tables = [layers, *(each for name in ("rope_scaling", "rope_parameters") if (each := layers.table(name, None)))]
    tables += [inner for each in tables[1:] if (inner := each.table("sliding_attention", None))]
    types = [(each.values.get("rope_type"), each.values.get("type")) for each in tables]
    if any("proportional" in each for each in types) or any("rope_dim" in each for each in tables):
        return False
    return any(each.number("partial_rotary_factor", 1.0, most=1.0) != 1.0 for each in tables)


def block_rope(files: Files, _: Any) -> dict[str, Any]:
    """The rotary embedding; if it differs by layer type, that of sliding ones. `rope_dim` is SGLang's rotated width."""
    found, size = read_rope(files.layers, "sliding_attention", in_part=True), block_sizes(files, None).head_dim
    for table in (found.get("rope_scaling"), found.get("rope_parameters")):
        if table is not None and (width := table.pop("rope_dim", None)) is not None:
            if not is_integer(width) or not 0 < width <= size or width % 2:
                raise ValueError(
                    f"rope_dim={short(width)} in {CONFIG} is invalid: expected an even number up to {size}"
                )
            table["partial_rotary_factor"] = width / size
    return found


def may_read_last(files: Files) -> bool:
    """Whether the last layer may be read, and how many the target has is unknown or says so."""
    layers = max(table.integer("num_target_layers", 0, most=4096) for table in (files.table(OWN), files.top))
    return not layers or taps_of_dflash(files, None)[-1] == layers


def block_sizes(files: Files, _: Any) -> LayerSizes:
    """Sizes of Qwen3's layers, whatever the tensors."""
    bias = files.layers.flag("attention_bias", False)
    sinks = [
        table.flag(name, None)
        for table in (files.table(OWN), files.layers)
        for name in ("attention_sink_bias", "add_swa_attention_sink_bias")
    ]
    return sizes(files, attention_bias=bias, output_bias=bias, qk_norm=True, sinks=True in sinks)


def gemma_sizes(files: Files, _: Any) -> LayerSizes:
    """Sizes of layers like the full ones of Gemma 4, whose fields are ambiguous if heads differ by type."""
    first = "layers.0.self_attn."
    [head_dim], [keys, _] = files.shape(f"{first}q_norm.weight") or (0,), files.shape(f"{first}k_proj.weight") or (0, 0)
    top, heads = files.top, {"head_dim": head_dim, "num_key_value_heads": keys // max(head_dim, 1)}
    heads["hidden_act"] = top.values.get("hidden_activation", "gelu_pytorch_tanh")
    layer = Fields({**top.values, **heads}, CONFIG)
    return sizes(files, layer=layer, gemma=True, keys_are_values=files.shape(f"{first}v_proj.weight") is None)


def windows_of(files: Files, **own: Any) -> tuple[int | None, ...]:
    """The windows of layers, whose fields `own` overrides. A longer list of types without windows is a target's."""
    values, count = {**files.layers.values, **own}, files.layers.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and len(kinds) > count and "sliding_attention" not in kinds:
        return (None,) * count
    return read_windows(Fields(values, files.layers.place), count)


def sight(window: int | None, of_anchor: bool = False, causal: bool = False) -> Sight:
    """Without a window, a layer sees all of a block, unless its format says otherwise."""
    return Sight(None, False, causal and not of_anchor) if window is None else Sight(window, of_anchor, causal)


def reaching(window: int | None, causal: bool = False) -> Sight:
    """As `sight`, of a window that counts the slot itself."""
    return sight(None if window is None else window - 1, causal=causal)


def of_anchor(default: bool) -> Row:
    """The row of `sights` in speculators' formats; `default` is whether slots in windows see later ones."""

    def row(files: Files, _: Any) -> tuple[Sight, ...]:
        causal = not files.top.flag("sliding_window_non_causal", default)
        return tuple(sight(window, of_anchor=True, causal=causal) for window in windows_of(files))

    return row


def sights_of_dflash(files: Files, _: Any) -> tuple[Sight, ...]:
    """The sights of z-lab and of those who follow it; `use_swa` gives all layers a window where none has one."""
    table, top = files.table(OWN), files.top
    swa, window = table.integer("swa_window_size", None), top.integer("sliding_window", None)
    forced = table.flag("use_swa", False)
    if swa is not None and not forced and window not in (None, swa):
        raise ValueError(
            f"swa_window_size={swa} in dflash_config and sliding_window={window} in {CONFIG} contradict each other"
        )
    window = window if swa is None else swa
    kinds = table.values.get("layer_types") or top.values.get("layer_types")
    windows = windows_of(files, sliding_window=window, layer_types=kinds)
    causal, by_types = _causal(files), any(windows)
    if forced and not by_types:
        windows = (top.integer("sliding_window") if window is None else window,) * len(windows)
    return tuple(
        reaching(each, by_types and each is not None if causal is None else causal) for each in windows
    )  # fmt: skip


def _causal(files: Files) -> bool | None:
    """Whether a slot sees no later slot, in any layer; None if that is not told. `causal_head` is JetSpec's."""
    places = {"causal": files.table(OWN), "causal_head": files.table(OWN), "is_causal": files.top}
    found = {name: flag for name, table in places.items() if (flag := table.flag(name, None)) is not None}
    if len(set(found.values())) > 1:
        named = " and ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"{named} in {CONFIG} contradict each other")
    return next(iter(found.values()), None)


def confidence(default: bool) -> Row:
    """The row of `confidence_head` by switches with a default."""

    def row(files: Files, _: Any) -> str:
        with_markov = files.top.flag("confidence_head_with_markov", default)
        return ("markov" if with_markov else "hidden") if files.top.flag("enable_confidence_head", default) else "none"

    return row


def shown_confidence(files: Files, _: Any) -> str:
    """Whether there is a confidence head, and its input, as its tensor shows."""
    shape = files.shape("confidence_head.proj.weight")
    if shape is None:
        return "none"
    return "hidden" if shape[-1] == files.top.integer("hidden_size") else "markov"


def learned_mask(files: Files, _: Any) -> bool:
    return (files.checkpoint.folder / LOOSE_MASK).is_file()


def multiplier(files: Files, each: Any) -> float:
    """The factor of the logits: z-lab's, and that of Cohere's targets, which vLLM reads."""
    return nested("output_multiplier", 1.0)(files, each) * files.layers.number("logit_scale", 1.0)


# Read by `converted`, so that the network needs no code for them.
_NEOX = ("rope_is_neox_style", "is_neox_style")
STORED = ("use_gemma_norm", "attention_value_scale", *_NEOX)


def converted(files: Files, config: BlockConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Folds factors into the weights, and lays heads out as here; see `PublishedFormat`.

    | field | what the files mean by it | read by |
    |---|---|---|
    | `use_gemma_norm` | norms multiply by 1 + weight | SGLang |
    | `rope_is_neox_style`, `is_neox_style` false | rotary pairs are neighbours, not halves of a head | SGLang, vLLM |
    | `dflash_config.attention_value_scale` | factor of the values | SGLang, vLLM |
    | `logit_scale` | factor of all logits, the previous token's bias included | vLLM |
    """
    layers, size = files.layers, config.sizes.head_dim
    found = [flag for name in _NEOX if (flag := layers.flag(name, None)) is not None]
    pairs, width = None, int(size * rotated_part(config.rotation))
    if found[:1] == [False]:
        pairs = torch.cat([torch.arange(width).view(-1, 2).T.flatten(), torch.arange(width, size)])
    gemma, values = layers.flag("use_gemma_norm", False), files.table(OWN).number("attention_value_scale", 1.0)
    bias = layers.number("logit_scale", 1.0)

    def each(name: str, weight: torch.Tensor) -> torch.Tensor:
        x = weight.float()
        if gemma and name.endswith("norm.weight"):
            x = x + 1.0
        if pairs is not None and any(part in name for part in ("q_proj.", "k_proj.", "q_norm.", "k_norm.")):
            x = x.unflatten(0, (-1, size))[:, pairs].flatten(0, 1)
        if "v_proj." in name:
            x = x * values
        if "markov_w2." in name:
            x = x * bias
        return x.to(weight.dtype)

    if pairs is None and not gemma and values == bias == 1.0:
        return state  # as it is mapped into memory
    return {name: each(name, tensor) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


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
_IGNORED = (*FOREIGN["of block drafters"], *STORED)
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
        ignored=_IGNORED,
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
            ignored=_IGNORED,
            converted=converted,
            expected={f"{OWN}.projector_type": ("dflash", "dflash2", "dspark", "domino")},
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
}


def _other(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the key of `_OTHERS`, and the field that tells it; empty strings for none."""
    table = config.get(OWN)
    own = table if isinstance(table, dict) else {}
    fields = {name: config.get(name) for name in ("architectures", "model_type")}
    fields |= {name: own.get(name) for name in own if name == "projector_type" or name.startswith("lilicorr")}
    texts = [(f"{name}={value!r}", f"{name} {value}".lower()) for name, value in fields.items()]
    found = ((key, field) for key in _OTHERS for field, text in texts if key in text)
    return next(found, ("", ""))


def _refuse(checkpoint: Checkpoint, **_: Any) -> Any:
    key, field = _other(checkpoint.config)
    raise ValueError(
        f"{printable(checkpoint.name)} is {_OTHERS[key]} ({printable(field, 200)}): that is not drafted with here; "
        "expected DFlash, DFlash2, DSpark, Domino or JetSpec (projector_type dflash, dflash2, dspark or domino)"
    )


def _is_other(checkpoint: Checkpoint) -> bool:
    return bool(_other(checkpoint.config)[0])


for _form in FORMATS:
    _form.register()
_possible = lambda config: bool(_other(config)[0])  # noqa: E731
register_format(Format("other block drafters", 15, _is_other, _refuse, possible=_possible, loads=False))
