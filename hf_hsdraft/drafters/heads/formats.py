"""Published formats of heads over the target's last hidden state, as tables. The tensors tell most sizes.

| format | written by | files |
|---|---|---|
| Medusa | its authors | `medusa_lm_head.pt`: `0.0.linear.weight`, `0.1.weight` |
| Medusa | TGI | `medusa_lm_head.safetensors`: the same, or no output layers |
| Medusa | vLLM | `blocks.0.layers.0.weight`, `lm_heads.0.weight`, perhaps `token_map` |
| Hydra | its authors | `hydra_lm_head.pt`: `hydra_mlp.0.0.linear.weight`, `hydra_lm_head.0.weight` |
| MLPSpeculator | IBM (fms-extras), Snowflake | `emb.0.weight`, `proj.0.weight`, `ln.0.weight`, `head.0.weight` |
| LSTM speculator | Snowflake (ArcticInference) | `forget_emb.0.weight`, `forget_proj.0.weight`, `cell_ln.0.weight` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field
from functools import partial
from typing import Any

from ...core.checks import short
from ...hub.checkpoint import Checkpoint
from ..base.published_format import OURS, Files, PublishedFormat, Row, same, told
from ..base.registry import Format, register_format
from ..base.target_info import fit_of
from .drafter import MOST_HEADS, TOKEN_MAP, HydraDrafter, LSTMSpeculatorDrafter, MedusaDrafter, MLPSpeculatorDrafter

_MOST_BLOCKS = 8


@dataclass(frozen=True)
class HeadsFormat(PublishedFormat):
    """As `PublishedFormat`; `fields` are marks of a config.json, any of which suffices."""

    marks: Callable[[Mapping[str, Any]], bool] = field(kw_only=True)

    def stored_name(self, name: str, stored: Collection[str]) -> str:
        return next((each for each in _names(name) if each in stored), name)

    def register(self) -> None:
        register_format(
            Format(
                self.name,
                self.rank,
                self.matches,
                partial(self.drafter.of_format, self),
                describe=self.describe,
                drafter=self.drafter,
                possible=self.marks,
                fit=lambda checkpoint, *target: fit_of(self.read(checkpoint, **self.given), *target),
            )
        )


def _names(name: str) -> list[str]:
    """The names that a parameter may have in files."""
    names = [name, f"medusa_heads.{name}", f"speculator.{name}"]
    if block := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(.*)", name):
        names.append("{}.{}.linear.{}".format(*block.groups()))
    if head := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
        names += [f"{head[1]}.{place}.weight" for place in range(_MOST_BLOCKS + 1)]
        names += ["lm_head.weight"] if head[1] == "0" else []
    if tied := re.fullmatch(r"(emb|ln|head|proj)\.([01])\.(.*)", name):  # a shared tensor may be stored as any of them
        first = 1 if tied[1] == "proj" else 0
        again = range(first, MOST_HEADS) if int(tied[2]) == first else ()
        own = [f"{tied[1]}.{index}.{tied[3]}" for index in again]
        # Snowflake's may be sequences of one part.
        own += [f"{tied[1]}.{tied[2]}.0.{tied[3]}"]
        names += [prefix + each for each in own for prefix in ("", "speculator.")]
    return names


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
    return None if files.shape("lm_heads.0.weight") is None else _size("lm_heads.0.weight", 0)(files, each)


def _has(*names: str) -> Callable[[Checkpoint], bool]:
    return lambda checkpoint: all(any(each in checkpoint.shapes for each in _names(name)) for name in names)


def _type(name: str, *fields: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: config.get("model_type") == name or any(config.get(each) is not None for each in fields)


def _form(name: str, drafter: Any, marks: Any, tensors: Any, rows: Any, **further: Any) -> HeadsFormat:
    target = {"target_name": lambda files, _: str(files.top.values.get("base_model_name_or_path") or "")}
    matches = lambda checkpoint: marks(checkpoint.config) and tensors(checkpoint)  # noqa: E731
    return HeadsFormat(name, 20, matches, drafter, {**rows, **target}, marks=marks, **further)


_OF_IBM = {
    **same("vocab_size"),
    "draft_vocab_size": told("vocab_size"),
    "target_hidden_size": _width("input_hidden_dim", "emb_dim"),
    "num_draft_steps": told("n_predict"),
    "tied": told("tie_weights", default=False),
    **same("scale_input", default=OURS),
}
_SPECULATOR = _type("mlp_speculator")

FORMATS = (
    _form(
        "Medusa", MedusaDrafter, _type("medusa", "medusa_num_heads"), _has("blocks.0.layers.0.weight"),
        {
            "vocab_size": _vocabulary,
            "draft_vocab_size": _drafted,
            "target_hidden_size": _size("blocks.0.layers.0.weight", 1),
            "num_draft_steps": _count("blocks.{}.layers.0.weight", MOST_HEADS),
            "num_layers": _count("blocks.0.layers.{}.weight", _MOST_BLOCKS),
            "block_bias": lambda files, _: files.shape("blocks.0.layers.0.bias") is not None,
            "one_head": told("original_lm_head", default=False),
            **same("logit_scale", default=OURS),
        },
        ignored=("medusa_fc_bias",),  # the tensors tell it
    ),
    _form(
        "Hydra", HydraDrafter, _type("hydra", "hydra_num_heads"), _has("hydra_lm_head.0.weight"),
        {
            "vocab_size": _size("hydra_lm_head.0.weight", 0),
            "draft_vocab_size": _size("hydra_lm_head.0.weight", 0),
            "target_hidden_size": _size("hydra_lm_head.0.weight", 1),
            "num_draft_steps": _count("hydra_lm_head.{}.weight", MOST_HEADS),
            "num_layers": _count("hydra_mlp.0.{}.linear.weight", _MOST_BLOCKS),
            "grounded": told("grounded_heads", default=False),
            "offset": told("hidden_state_offset", default=OURS),
        },
        expected={"hydra_head_arch": ("mlp",)},
    ),
    _form(
        "MLPSpeculator", MLPSpeculatorDrafter, _SPECULATOR, _has("emb.0.weight"),
        {**_OF_IBM, "inner_size": _width("inner_dim", "emb_dim")}, expected={"method": ("sum_rnn",)},
    ),
    _form(
        "LSTM speculator", LSTMSpeculatorDrafter, _SPECULATOR, _has("forget_emb.0.weight"),
        {**_OF_IBM, "inner_size": _width("inner_dim")},
        expected={"method": ("sum_lstm",), "tie_lstm_embs": (True,), "tie_weights": (True,)},
    ),
)  # fmt: skip

for _each in FORMATS:
    _each.register()
