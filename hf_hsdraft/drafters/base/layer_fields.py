"""Reads fields of layers, which all formats of published drafters name as transformers does, and vocabulary maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.checks import printable, short
from ...core.fields import REQUIRED, Fields
from ...hub.checkpoint import Checkpoint
from .decoder_layer import LayerSizes
from .plain_config import most_of

MOST_LAYERS = 64
# Sizes that only some formats have; checked here so that a negative one is always refused.
_SOMETIMES_READ = (
    "num_hidden_layers", "num_target_layers", "sliding_window", "max_window_layers", "draft_vocab_size",
    "target_hidden_size",
)  # fmt: skip
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_KINDS = ("full_attention", "sliding_attention")


def read_sizes(fields: Fields, attention_bias: bool, output_bias: bool, qk_norm: bool) -> LayerSizes:
    """Reads sizes; the flags are as in `LayerSizes`, and formats express them differently."""
    fields.expect("mlp_bias", False)
    for name in _SOMETIMES_READ:
        fields.integer(name, None, least=0)

    def size(name: str, default: Any = REQUIRED) -> int:
        return fields.integer(name, default, most=most_of(LayerSizes, name))

    width, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim", width // heads)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} is invalid in {fields.place} (hidden_size={width}, num_attention_heads={heads}): "
            "expected an even number of 2 or more, for rotary embeddings"
        )
    return LayerSizes(
        hidden_size=width,
        intermediate_size=size("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, most=1.0),
        attention_bias=attention_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        hidden_act=fields.choice("hidden_act", _ACTIVATIONS, "silu"),
    )


def read_rope(fields: Fields, kind: str = "", whole_heads: bool = False) -> dict[str, Any]:
    """Reads the rotary embedding in the form that `rotary_of` takes; raises a ValueError if heads are rotated in part.

    Args:
        kind: layer type whose entry is read if `rope_parameters` has one per type.
        whole_heads: ignore a partial rotary factor: files copied from the target's configuration describe the target.
    """
    rope = {name: value for name in ("rope_theta",) if (value := fields.number(name, None)) is not None}
    if (longest := fields.integer("max_position_embeddings", None)) is not None:
        rope["max_position_embeddings"] = longest
    if not whole_heads:
        fields.expect("partial_rotary_factor", 1, 1.0)
    scaling = fields.table("rope_scaling", None)
    if scaling is not None:
        rope["rope_scaling"] = _rotation(scaling, whole_heads)
    parameters = fields.table("rope_parameters", None)
    if parameters is not None:
        parameters = (parameters.table(kind, None) if kind else None) or parameters
        rope["rope_parameters"] = _rotation(parameters, whole_heads)
    return rope


def _rotation(table: Fields, whole_heads: bool) -> dict[str, Any]:
    """Reads one rotary embedding. "mrope" is plain rope for text, whose axes are equal."""
    named = {name: table.values[name] for name in ("rope_type", "type") if name in table}
    if any(not isinstance(each, str) for each in named.values()):
        raise ValueError(f"rope_type={short(named)} in {table.place} is invalid: expected a name, such as 'yarn'")
    found = {name: value for name, value in table.values.items() if not name.startswith("mrope_")}
    found |= {name: "default" if each == "mrope" else each for name, each in named.items()}
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        table.number(name, None)
    if whole_heads and set(named.values()) <= {"default", "mrope"}:
        found.pop("partial_rotary_factor", None)
    elif "proportional" in named.values():  # rotates whole heads, parts of them by angle 0
        table.number("partial_rotary_factor", None, most=1.0)
    else:
        table.expect("partial_rotary_factor", 1, 1.0)
    return found


def read_windows(fields: Fields, kinds: Any, count: int) -> tuple[int | None, ...]:
    """Reads the sliding window of each layer, None for full attention; raises a ValueError for wrong `layer_types`."""
    if not (isinstance(kinds, Sequence) and len(kinds) == count and all(kind in _KINDS for kind in kinds)):
        wanted = f"{count} of {' and '.join(_KINDS)}"
        raise ValueError(f"layer_types={short(kinds)} in {fields.place} is invalid: expected {wanted}")
    window = fields.integer("sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def drafted_ids(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor:
    """Returns `[V']`, int64, the token id of each row of the head: the row's number plus `d2t` `[V']`.

    `t2d` `[vocab_size]`, if there, marks the drafted tokens. Raises a ValueError if maps are not integers or contradict
    each other, or ids repeat or exceed the vocabulary.
    """
    name, maps = printable(checkpoint.name), dict(checkpoint.tensors(("d2t", "t2d")))
    for title, tensor in maps.items():
        if tensor.is_floating_point() or (title == "d2t" and tensor.dtype == torch.bool):
            wanted = "integers" if title == "d2t" else "bool or integers"
            raise ValueError(f"{title} of {name} has dtype {tensor.dtype}: expected {wanted}")
    ids = torch.arange(len(maps["d2t"])) + maps["d2t"].long()
    least, most, again = int(ids.min()), int(ids.max()), len(ids) - len(ids.unique())
    if least < 0 or most >= vocab_size or again:
        raise ValueError(
            f"d2t of {name} leads to tokens {least} to {most}, {again} of them twice: expected 0 to {vocab_size - 1}, "
            "each once, as the number of its row plus d2t"
        )
    marked = maps.get("t2d")
    if marked is not None and not torch.equal(ids.sort().values, marked.nonzero().flatten()):
        raise ValueError(f"d2t and t2d of {name} name different tokens: expected each drafted token once, in both")
    return ids
