"""Reads what other projects write of layers: sizes, rotary embeddings, windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING

from ...core.checks import demand, is_integer, printable, settings, short
from ...hub.drafter_files import CONFIG
from .decoder_layer import LayerSizes
from .fields import Fields

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# Sizes that only some formats have; checked here so that a negative one is always refused.
_SOMETIMES_READ = (
    "num_hidden_layers", "num_target_layers", "sliding_window", "max_window_layers", "draft_vocab_size",
    "target_hidden_size",
)  # fmt: skip
_SHOWN_PARTS = {
    "attention_bias": "self_attn.q_proj.bias", "output_bias": "self_attn.o_proj.bias", "mlp_bias": "mlp.up_proj.bias",
    "qk_norm": "self_attn.q_norm.weight",
}  # fmt: skip
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")  # names that vLLM takes
_RENAMED = {"mrope": "default", "deepseek_yarn": "yarn"}  # types of rotary embeddings
_KINDS = ("full_attention", "sliding_attention")


def sizes(files: Any, _: Any = None, layer: Fields | None = None, kind: Any = LayerSizes, **special: Any) -> LayerSizes:
    """Reads sizes of layers from `Files`; tensors of the first one show biases, and norms of queries and keys."""
    layer, limits = layer or files.layers, {each.name: each.metadata["limit"] for each in settings(LayerSizes)}
    for name in _SOMETIMES_READ:
        layer.integer(name, None, least=0)
    required = "hidden_size", "intermediate_size", "num_attention_heads"
    found: dict[str, Any] = {name: layer.checked(name, limits[name]) for name in required}
    width, heads = found["hidden_size"], found["num_attention_heads"]
    usual = {"num_key_value_heads": heads, "head_dim": width // heads, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    found |= {name: layer.checked(name, limits[name], default) for name, default in usual.items()}
    found |= {name: files.shape(f"layers.0.{part}") is not None for name, part in _SHOWN_PARTS.items()}
    return kind(**{**found, **special})


def gemma_sizes(files: Any, _: Any) -> LayerSizes:
    """Sizes of layers like the full ones of Gemma 4, whose fields are ambiguous if heads differ by type."""
    first = "layers.0.self_attn."
    [head_dim], [keys, _] = files.shape(f"{first}q_norm.weight") or (0,), files.shape(f"{first}k_proj.weight") or (0, 0)
    top, heads = files.top, {"head_dim": head_dim, "num_key_value_heads": keys // max(head_dim, 1)}
    heads["hidden_act"] = top.values.get("hidden_activation", "gelu_pytorch_tanh")
    layer = Fields({**top.values, **heads}, CONFIG)
    return sizes(files, layer=layer, gemma=True, keys_are_values=files.shape(f"{first}v_proj.weight") is None)


# What Gemma 4's layers are to be, for drafters that are made of them
OF_GEMMA: Mapping[str, Sequence[Any]] = {
    "model_type": ("gemma4_text", "gemma4_unified_text"),
    **dict.fromkeys(("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input"), (False, 0)),
}


def rope(kind: str = "", in_part: bool = False) -> Callable[[Any, Any], dict[str, Any]]:
    """Returns the row of `rope`, see `read_rope`."""
    return lambda files, _: read_rope(files.layers, kind, in_part)


def read_rope(layer: Fields, kind: str = "", in_part: bool = False) -> dict[str, Any]:
    """Reads the rotary embedding in the form that `rotary_of` takes.

    Args:
        kind: layer type whose entry is read if `rope_parameters` has one per type.
        in_part: whether only the first part of each head may be rotated; otherwise a ValueError is raised for it.
    """
    theta = layer.number("rope_theta", layer.number("rotary_emb_base", None))  # the latter is a name that vLLM takes
    found = {} if theta is None else {"rope_theta": theta}
    if (longest := layer.integer("max_position_embeddings", None)) is not None:
        found["max_position_embeddings"] = longest
    if in_part:
        factors = [layer.number(name, None, most=1.0) for name in PARTIAL]
        if (part := next((each for each in factors if each is not None), 1.0)) != 1.0:
            found["partial_rotary_factor"] = part
    else:
        layer.expect("partial_rotary_factor", 1, 1.0)
    for name in ("rope_scaling", "rope_parameters"):
        table = layer.table(name, None)
        if table is not None:
            table = (table.table(kind, None) if kind else None) or table
            found[name] = _rotation(table, layer, in_part)
    return found


def _rotation(table: Fields, layer: Fields, in_part: bool) -> dict[str, Any]:
    """Reads one rotary embedding. "mrope" is plain rope for text, whose axes are equal."""
    named = {name: table.values[name] for name in ("rope_type", "type") if name in table}
    if any(not isinstance(each, str) for each in named.values()):
        raise ValueError(f"rope_type={short(named)} in {table.place} is invalid: expected a name, such as 'yarn'")
    found = {name: value for name, value in table.values.items() if not name.startswith("mrope_")}
    found |= {name: _RENAMED.get(each, each) for name, each in named.items()}
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        table.number(name, None)
    if in_part or "proportional" in named.values():  # the latter rotates whole heads, parts of them by angle 0
        table.number("partial_rotary_factor", None, most=1.0)
    else:
        table.expect("partial_rotary_factor", 1, 1.0)
    width, size = found.pop("rope_dim", None), layer.integer("head_dim", None)  # how vLLM and SGLang tell the part
    if width is not None and (size := size or _usual_width(layer)) is not None:
        in_part = in_part and "proportional" not in named.values()
        fits = is_integer(width) and (width == size or (in_part and 0 < width < size and width % 2 == 0))
        demand(fits, "rope_dim", width, f"expected an even number up to {size}" if in_part else f"expected {size}")
        if in_part:
            found["partial_rotary_factor"] = width / size
    return found


def _usual_width(layer: Fields) -> int | None:
    """The width of a head where none is told; None as long as the defaults of a class are not filled in."""
    width, heads = layer.integer("hidden_size", None), layer.integer("num_attention_heads", None)
    return width // heads if width and heads else None


def read_windows(layer: Fields, count: int, by_types_alone: bool = False) -> tuple[int | None, ...]:
    """Reads the sliding window of each layer, None for full attention; raises a ValueError for wrong `layer_types`.

    Without them, it derives the window as Qwen3's configuration does, unless `by_types_alone`.
    """
    kinds = layer.values.get("layer_types")
    if by_types_alone and (kinds is None or (isinstance(kinds, list) and "sliding_attention" not in kinds)):
        return (None,) * count
    if kinds is None:
        slides = layer.flag("use_sliding_window", False) and "sliding_window" in layer
        first = layer.integer("max_window_layers", 28, least=0) if slides else count
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    if not (isinstance(kinds, Sequence) and len(kinds) == count and all(kind in _KINDS for kind in kinds)):
        wanted = f"{count} of {' and '.join(_KINDS)}"
        raise ValueError(f"layer_types={short(kinds)} in {layer.place} is invalid: expected {wanted}")
    window = layer.integer("sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def with_defaults(given: Fields, types: Sequence[str]) -> Fields:
    """Fills in the defaults of transformers' class, of one of `types`; a switch at its default needs no reader."""
    kind = given.values.get("model_type", types[0])
    if not isinstance(kind, str) or kind not in (types if len(types) > 1 else CONFIG_MAPPING):
        wanted = " or ".join(types) if len(types) > 1 else f"a model_type of transformers, such as {types[0]}"
        raise ValueError(f"model_type={short(kind)} in {given.place} is invalid: expected {wanted}")
    read_rope(given, "sliding_attention", in_part=True)  # before transformers replaces some invalid values
    rotation = {name: given.values[name] for name in _ROPE if name in given}
    left = ("model_type", *_ROPE)
    kept = {name: value for name, value in given.values.items() if value is not None and name not in left}
    try:
        defaults, made = CONFIG_MAPPING[kind]().to_dict(), CONFIG_MAPPING[kind](**kept).to_dict()
    except Exception as error:  # transformers raises various types for wrong values
        message = f"{given.place} is invalid ({printable(error)}): expected fields of {CONFIG_MAPPING[kind].__name__}"
        raise ValueError(message) from error
    usual = (made.pop("rope_parameters", None) or {}) if rotation else {}
    if not rotation.keys() & {"rope_theta", "rope_parameters"} and usual.get("rope_theta") is not None:
        rotation["rope_theta"] = usual["rope_theta"]
    found = Fields({**made, **given.values, **rotation}, given.place)
    found.ignore(*(name for name, value in found.values.items() if name in defaults and defaults[name] == value))
    return found
