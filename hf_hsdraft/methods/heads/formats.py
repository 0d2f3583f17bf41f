"""Published formats of heads over the target's last hidden state, as tables. The tensors tell most sizes.

| format | written by | files |
|---|---|---|
| Medusa | its authors | `medusa_lm_head.pt`: `0.0.linear.weight`, `0.1.weight` |
| Medusa | TGI | `medusa_lm_head.safetensors`: the same, or no output layers |
| Medusa | vLLM | `blocks.0.layers.0.weight`, `lm_heads.0.weight`, perhaps `token_map` |
| Hydra | its authors | `hydra_lm_head.pt`: `hydra_mlp.0.0.linear.weight`, `hydra_lm_head.0.weight` |
| Hydra++ | its authors | the same, `hydra_mlp.0.1.`, `hydra_lm_head.0.1.`, `prefix_embeding_layer.` |
| MLPSpeculator | IBM (fms-extras), Snowflake | `emb.0.weight`, `proj.0.weight`, `ln.0.weight`, `head.0.weight` |
| LSTM speculator | Snowflake (ArcticInference) | `forget_emb.0.weight`, `forget_proj.0.weight`, `cell_ln.0.weight` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field
from typing import Any

from ...core.checks import public_name, short
from ..published.format_table import OURS, Files, PublishedFormat, Row, same, shown, told
from ..published.network import TOKEN_MAP
from .drafter import MOST_HEADS, HydraDrafter, LSTMSpeculatorDrafter, MedusaDrafter, MLPSpeculatorDrafter
from .prefix import PrefixHydraDrafter

_MOST_BLOCKS = 8

# Beginnings of names in files by ours
_OF_MEDUSA = {
    f"blocks.{head}.layers.{block}.": (f"medusa_heads.blocks.{head}.layers.{block}.", f"{head}.{block}.linear.")
    for head in range(MOST_HEADS)
    for block in range(_MOST_BLOCKS)
} | {
    f"lm_heads.{head}.weight": (
        f"medusa_heads.lm_heads.{head}.weight",
        *(f"{head}.{block}.weight" for block in range(1, _MOST_BLOCKS + 1)),
        *(["lm_head.weight"] if not head else []),
    )
    for head in range(MOST_HEADS)
}
_FIRST_BLOCK = ("0.0.linear.weight", "blocks.0.layers.0.weight", "medusa_heads.blocks.0.layers.0.weight")
_PREFIXES = ("", "speculator.")
_OF_SPECULATOR = (
    {
        f"{part}.{first}.": tuple(  # shared tensors may be stored as those of any head
            f"{prefix}{part}.{head}." for head in range(first, MOST_HEADS) for prefix in _PREFIXES
        )
        for part, first in (("emb", 0), ("ln", 0), ("head", 0), ("proj", 1))
    }
    | {"": _PREFIXES[1:]}
)


def _size(name: str, axis: int) -> Row:
    """Returns a row: a size of a tensor."""

    def row(files: Files, each: Field[Any]) -> Any:
        shape = files.shape(name)
        if shape is None or len(shape) != 2:
            raise ValueError(f"the files have no {name} of two axes, but {short(shape)}: expected those as published")
        return shape[axis]

    return row


def _count(name: str, most: int) -> Row:
    """Returns a row: the number of tensors whose names differ in their index."""
    return lambda files, _: next((i for i in range(most) if files.shape(name.format(i)) is None), most)


def _width(*names: str) -> Row:
    """Returns a row: the first width above 0, which Snowflake's files may write as a list, or a text, of one."""

    def row(files: Files, each: Field[Any]) -> Any:
        found = [value for name in names if (value := files.top.values.get(name))]
        value = found[0][0] if found and isinstance(found[0], list) and len(found[0]) == 1 else next(iter(found), None)
        value = int(value) if isinstance(value, str) and value.isdigit() else value
        if not each.metadata["limit"].valid(value):
            raise ValueError(
                f"{names[0]}={short(value)} in config.json is invalid: expected {each.metadata['limit'].wanted}"
            )
        return value

    return row


def _vocabulary(files: Files, each: Field[Any]) -> int | None:
    """The vocabulary that config.json names, or that of a whole output layer; None without output layers."""
    if files.shape("lm_heads.0.weight") is None:
        return None
    known = TOKEN_MAP in files.checkpoint.shapes or "vocab_size" in files.top
    return told("vocab_size")(files, each) if known else _size("lm_heads.0.weight", 0)(files, each)


def _drafted(files: Files, each: Field[Any]) -> int | None:
    if (size := _vocabulary(files, each)) is None:
        return None
    rows = _size("lm_heads.0.weight", 0)(files, each)
    if rows < size and TOKEN_MAP not in files.checkpoint.shapes:
        raise ValueError(
            f"the output layers have {rows} rows, and vocab_size={size} in config.json: expected as many, or the "
            f"tokens of these rows among the weights, as {TOKEN_MAP}"
        )
    return rows


def _form(name: str, drafter: Any, marks: Sequence[str], rows: Any, **further: Any) -> PublishedFormat:
    """Returns a format that has one of the tensors `marks`."""
    target = {"target_name": lambda files, _: public_name(str(files.top.values.get("base_model_name_or_path") or ""))}
    matches = lambda checkpoint: any(each in checkpoint.shapes for each in marks)  # noqa: E731
    return PublishedFormat(name, 20, matches, drafter, {**rows, **target}, **further)


_OF_IBM = {
    **same("vocab_size"),
    "draft_vocab_size": told("vocab_size"),
    "target_hidden_size": _width("input_hidden_dim", "emb_dim"),
    "num_draft_steps": told("n_predict"),
    "tied": told("tie_weights", default=False),
    **same("scale_input", default=OURS),
}
_MEDUSA = {
    "vocab_size": _vocabulary,
    "draft_vocab_size": _drafted,
    "target_hidden_size": _size("blocks.0.layers.0.weight", 1),
    "num_draft_steps": _count("blocks.{}.layers.0.weight", MOST_HEADS),
    "num_layers": _count("blocks.0.layers.{}.weight", _MOST_BLOCKS),
    "block_bias": shown("blocks.0.layers.0.bias"),
    "one_head": told("original_lm_head", default=False),
    **same("logit_scale", default=OURS),
}


def _hydra_blocks(files: Files, _: Any) -> int:
    """The number of blocks of a head, by their published names: layers of dropout may be counted between them."""
    names = files.checkpoint.shapes
    return sum(name.startswith("hydra_mlp.0.") and name.endswith(".linear.weight") for name in names)


_HYDRA = {
    "vocab_size": _size("hydra_lm_head.0.weight", 0),
    "draft_vocab_size": _size("hydra_lm_head.0.weight", 0),
    "target_hidden_size": _size("hydra_lm_head.0.weight", 1),
    "num_draft_steps": _count("hydra_lm_head.{}.weight", MOST_HEADS),
    "num_layers": _hydra_blocks,
    "grounded": told("grounded_heads", default=False),
    "offset": told("hidden_state_offset", default=OURS),
}
_PREFIX = "prefix_embeding_layer.layers.0."
_OF_DROPOUT = {  # beginnings of names in files by ours, where layers of dropout are counted
    **{f"hydra_lm_head.{head}.": (f"hydra_lm_head.{head}.1.",) for head in range(MOST_HEADS)},
    **{
        f"hydra_mlp.{head}.{block}.": (f"hydra_mlp.{head}.{2 * block + 1}.",)
        for head in range(MOST_HEADS)
        for block in range(_MOST_BLOCKS)
    },
}

FORMATS = (
    *(
        _form(
            name, MedusaDrafter, _FIRST_BLOCK, _MEDUSA,
            tensors=_OF_MEDUSA, needed=needed,
            ignored=("medusa_fc_bias",),  # the tensors tell it
        )
        for name, needed in (("Medusa", ("medusa_num_heads",)), ("Medusa (vLLM)", ("num_heads",)))
    ),
    _form(
        "Hydra", HydraDrafter, ("hydra_lm_head.0.weight",), _HYDRA, expected={"hydra_head_arch": ("mlp",)},
        needed=("hydra_num_heads",),
    ),
    _form(
        "Hydra++", PrefixHydraDrafter, ("hydra_lm_head.0.1.weight",),
        {
            **_HYDRA,
            "query_size": _size(f"{_PREFIX}self_attn.q_proj.weight", 0),
            "key_size": _size(f"{_PREFIX}self_attn.k_proj.weight", 0),
            "intermediate_size": _size(f"{_PREFIX}mlp.gate_proj.weight", 0),
            "attention_bias": shown(f"{_PREFIX}self_attn.q_proj.bias"),
        },
        expected={"hydra_head_arch": ("prefix-mlp",)}, needed=("hydra_num_heads",), tensors=_OF_DROPOUT,
    ),
    _form(
        "MLPSpeculator", MLPSpeculatorDrafter, [f"{prefix}proj.0.weight" for prefix in _PREFIXES],
        {**_OF_IBM, "inner_size": _width("inner_dim", "emb_dim")},
        expected={"method": ("sum_rnn",)}, tensors=_OF_SPECULATOR, needed=("n_predict",),
    ),
    _form(
        "LSTM speculator", LSTMSpeculatorDrafter, [f"{prefix}forget_emb.0.weight" for prefix in _PREFIXES],
        {**_OF_IBM, "inner_size": _width("inner_dim")},
        expected={"method": ("sum_lstm",), "tie_lstm_embs": (True,), "tie_weights": (True,)},
        tensors=_OF_SPECULATOR, needed=("n_predict",),
    ),
)  # fmt: skip

for _each in FORMATS:
    _each.register()
