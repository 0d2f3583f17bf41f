"""Rows of block drafters' formats that need more than the name of a field, and weights that are stored differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...hub.checkpoint import LOOSE_MASK
from ...hub.drafter_files import CONFIG
from ..published.decoder_layer import LayerSizes
from ..published.fields import Fields
from ..published.format_table import REQUIRED, Files, Row, taps, told
from ..published.layer_tables import PARTIAL, read_windows, sizes
from ..published.network import MOST_LAYERS
from .configuration import BlockConfig, Sight, spread_layers

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
    factors = [each.number(PARTIAL[0], 1.0, most=1.0) for each in tables]
    return any(each != 1.0 for each in (*factors, *(layers.number(name, 1.0, most=1.0) for name in PARTIAL)))


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
    return tuple(reaching(each, by_types and each is not None if causal is None else causal) for each in windows)


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


def rotated_part(rotation: Mapping[str, Any]) -> float:
    """The part of a head that is rotated, as in `rotary_of`: "proportional" rotates whole heads, parts by angle 0."""
    named = (rotation.get("rope_scaling") or {}, rotation.get("rope_parameters") or {})
    tables = [each for each in named if "proportional" not in (each.get("rope_type"), each.get("type"))]
    return next((each["partial_rotary_factor"] for each in (*tables, rotation) if "partial_rotary_factor" in each), 1.0)


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
