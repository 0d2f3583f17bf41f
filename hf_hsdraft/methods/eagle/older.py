"""Published formats of EAGLE-1, EAGLE-2, HASS and FR-Spec drafters, as tables.

`fc` fuses a token's embedding with one hidden state, the last one after the final norm, and output rows are the
target's. They are written by their authors, by vLLM (`model`) and by the package speculators (`eagle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...core.checks import demand, few, is_integer, printable
from ..published.checkpoint import AnyCheckpoint, speculators_type
from ..published.format_table import Files, PublishedFormat, speculators, told
from ..published.layer_tables import sizes
from ..published.network import TOKEN_MAP
from ..published.refusals import register_refusal, with_fields
from .drafter import EagleDrafter
from .formats import COMMON, EXPECTED, IGNORED, TYPES, is_eagle4, layers, of_target, proposed

_LISTS, _USUAL_LIST = "freq_*.pt", 32768


def _is_eagle1(checkpoint: AnyCheckpoint, nested: bool) -> bool:
    """Whether `fc` takes an embedding and a state of the same width, and no layer does."""
    names, config = checkpoint.shapes, checkpoint.config
    width = names.get("fc.weight", (0, 1))
    others = speculators_type(checkpoint) or is_eagle4(checkpoint) or of_target(names)
    has_layer = any(name.endswith("layers.0.self_attn.q_proj.weight") for name in names)
    is_older = has_layer and not any("hidden_norm" in name for name in names)
    return not others and is_older and width[1] == 2 * width[0] and isinstance(config.get("model"), dict) is nested


def _frequent(files: Files) -> tuple[int, ...] | None:
    """The drafted tokens of a list beside an EAGLE-2 drafter (FR-Spec; 32,768 tokens), unless among the weights."""
    checkpoint, given = files.checkpoint, files.given.get("frequent_tokens")
    if isinstance(given, str) or (given is None and TOKEN_MAP not in checkpoint.shapes):
        folder, name = checkpoint.also(given or _LISTS), given or f"freq_{_USUAL_LIST}.pt"
        lists = [folder / name] if (folder / name).is_file() or given else sorted(folder.glob(_LISTS))
        given = _listed(lists[-1]) if lists else None
    if given is None:
        return None
    ids = given.tolist() if isinstance(given, torch.Tensor) else given
    valid = isinstance(ids, Sequence) and len(ids) > 0 and all(map(is_integer, ids))
    demand(valid, "frequent_tokens", ids, "expected a list of token ids")
    return tuple(ids)


def _listed(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        why = printable(error) or type(error).__name__
        raise ValueError(f"frequent_tokens={path.name!r} cannot be read ({why}): expected a list of tokens") from error


def _drafted(files: Files, _: Any = None) -> int:
    """The number of tokens that can be drafted."""
    ids, vocab_size = _frequent(files), files.layers.integer("vocab_size")
    return files.checkpoint.shapes.get(TOKEN_MAP, (vocab_size,))[0] if ids is None else len(ids)


def _has_listed_head(files: Files, _: Any) -> bool:
    """Whether there are output rows of the drafted tokens; a longer head is a copy of the target's."""
    shape = files.shape("lm_head.weight")
    return shape is not None and shape[0] == _drafted(files)


_OF_EAGLE1 = {
    **COMMON,
    "fuses_embedding": True,
    "target_tap_layers": (-1,),
    "last_tap_is_normed": True,
    "own_head": _has_listed_head,
}
_OF_AUTHORS = {
    **_OF_EAGLE1,
    "vocab_size": told("layers.vocab_size"),
    "target_hidden_size": told("layers.hidden_size"),
    "sizes": sizes,
    "num_hidden_layers": layers,
    "draft_vocab_size": _drafted,
    "draft_vocab_ids": lambda files, _: _frequent(files),
}

OLDER_FORMATS = (
    *(
        PublishedFormat(
            title,
            71,
            partial(_is_eagle1, nested=bool(place)),
            EagleDrafter,
            _OF_AUTHORS,
            layers=place,
            ignored=IGNORED,
            expected=EXPECTED,
            # Their classes load no others.
            unread=("d2t", "layers.0.input_layernorm.weight", "lm_head.weight", "norm.weight", "t2d", TOKEN_MAP),
            tensors={name: (f"model.model.{name}", f"model.{name}") for name in ("layers.", "embed_tokens.")},
            given={"frequent_tokens": None},
            needed=(place or "hidden_size",),
        )
        for title, place in (("EAGLE-1, EAGLE-2, HASS, FR-Spec", ""), ("EAGLE-1 of vLLM", "model"))
    ),
    speculators(
        "eagle",
        EagleDrafter,
        {**_OF_EAGLE1, "draft_vocab_size": told("layers.vocab_size"), "num_draft_steps": proposed},
        with_defaults=TYPES[::-1],
        ignored=(*IGNORED, "fusion_bias"),  # the tensors show it
        expected={**EXPECTED, "layernorms": (False,)},  # readers apply the norms at different places
        tensors={"fc.": ("fusion_fc.",), "layers.0.": ("transformer.",)},
    ),
)

_NORMS = ("enorm.weight", "hnorm.weight", "input_norm1.weight", "input_norm2.weight")


def _why_other(checkpoint: AnyCheckpoint) -> str:
    """Returns which other EAGLE-1 drafter this is: vLLM's `deepseek_eagle.py`, `minicpm_eagle.py`."""
    names = checkpoint.shapes
    width, norms = names.get("fc.weight", (0, 1)), [name for name in _NORMS if name in names]
    latent = [name for name in names if "kv_a_proj" in name]
    is_older = width[1] == 2 * width[0] and not any("hidden_norm" in name for name in names)
    if speculators_type(checkpoint) or not is_older or not (norms or latent):
        return ""
    what = "norms of the inputs of fc" if norms else "multi-head latent attention (MLA)"
    return f"is EAGLE-1 with {what} ({few(norms or latent)}): that is not drafted with here; expected EAGLE-1 without"


for _form in OLDER_FORMATS:
    _form.register()
register_refusal("other EAGLE-1 drafters", 70, _why_other, with_fields("hidden_size"))
