"""Published formats of EAGLE drafters, as tables.

| format | written by | hidden states it names |
|---|---|---|
| speculators `eagle3`, `peagle` | vLLM's package speculators | `eagle_aux_hidden_state_layer_ids`, as written |
| EAGLE-3 | its authors | none: 2, L // 2 and L - 3 |
| EAGLE-3, P-EAGLE | SpecForge, AngelSlim, ModelOpt | `eagle_config.eagle_aux_hidden_state_layer_ids`, plus one |
| EAGLE-3, P-EAGLE | NeMo AutoModel | none, as its authors |
| EAGLE-3 | DeepSpec, also of Gemma 4's layers | `target_layer_ids`, plus one |

Tensors have the network's parameter names, except that the first layer may be called `midlayer`. Those of EAGLE-1 and
EAGLE-2 are in `older.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

import torch

from ...core.checks import few
from ..published.checkpoint import AnyCheckpoint, speculators_type
from ..published.decoder_layer import LayerSizes
from ..published.fields import Fields
from ..published.format_table import (
    FOREIGN,
    OURS,
    USUAL_DRAFTED,
    Files,
    PublishedFormat,
    Row,
    same,
    shown,
    speculators,
    taps,
    told,
)
from ..published.layer_tables import OF_GEMMA, gemma_sizes, read_windows, rope, sizes
from ..published.refusals import register_refusal
from .configuration import DRAFT_STEPS, EagleConfig, LatentSizes
from .drafter import EagleDrafter

_IDS, _OWN = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_OF_NEMO = "LlamaEagle3DraftModel"
_PARALLEL_STEPS = 8  # SpecForge's and NeMo's training depth of parallel drafters, if the files lack it


def _sizes(files: Files, _: Any) -> LayerSizes:
    """Sizes of layers; of Llama 4's two inner widths it is that of layers without experts."""
    top = files.top
    if files.shape("layers.0.self_attn.kv_a_proj_with_mqa.weight") is not None:
        return _latent_sizes(files)
    if top.values.get("model_type") != "llama4_text" or "intermediate_size_mlp" not in top:
        return sizes(files)
    return sizes(files, intermediate_size=top.integer("intermediate_size_mlp"))


def _latent_sizes(files: Files) -> LayerSizes:
    """Sizes of MLA. With YaRN, `mscale_all_dim` is a factor of the scores too (DeepSeek-V3, Kimi K2)."""
    top, own = files.top, {each.name: each.metadata["limit"] for each in fields(LatentSizes)}
    found = {name: top.checked(name, own[name]) for name in ("kv_lora_rank", "v_head_dim")}
    rotated, plain = (top.integer(f"qk_{part}_head_dim") for part in ("rope", "nope"))
    top.expect("rope_interleave", True)
    yarn = top.table("rope_scaling", None) or top.table("rope_parameters", None)
    mscale = yarn.number("mscale_all_dim", 0.0, least=-1.0) if yarn is not None and "factor" in yarn else 0.0
    scale = 1.0 + 0.1 * mscale * math.log(yarn.number("factor")) if mscale else 1.0
    return sizes(
        files,
        kind=LatentSizes,
        q_lora_rank=top.checked("q_lora_rank", own["q_lora_rank"], None),
        rotary_dim=rotated,
        head_dim=rotated + plain,
        num_key_value_heads=top.integer("num_attention_heads"),
        score_scale=scale * scale,
        attention_bias=files.shape("layers.0.self_attn.kv_a_proj_with_mqa.bias") is not None,
        **found,
    )


def layers(files: Files, _: Any = None) -> int:
    """The number of layers that have tensors: the files of some projects give the target's."""
    found = [re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in files.checkpoint.shapes]
    return 1 + max((int(each[1]) for each in found if each), default=0)


def _windows(files: Files, _: Any) -> tuple[int | None, ...]:
    """The window of each layer; only layers of the type have one. A longer list was copied from the target."""
    is_told = bool(speculators_type(files.checkpoint))
    count = files.layers.integer("num_hidden_layers", 1) if is_told else layers(files)
    kinds = files.layers.values.get("layer_types")
    if isinstance(kinds, list) and len(kinds) > count and not is_told:
        return (None,) * count
    return read_windows(files.layers, count, by_types_alone=True)


def proposed(files: Files, each: Field[Any]) -> int:
    """The greatest draft depth, which only files of this package name.

    Others name the number of tokens proposed at once. For a parallel drafter this is its training depth; an
    autoregressive one may go deeper than that serving default.
    """
    proposals = files.table("speculators_config").values.get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    place = "config.json, speculators_config.proposal_methods"
    own = Fields(first if isinstance(first, dict) else {}, place)
    proposed = own.checked("speculative_tokens", each.metadata["limit"], DRAFT_STEPS)
    parallel = speculators_type(files.checkpoint) == "peagle"
    return told("num_draft_steps", default=proposed if parallel else max(proposed, DRAFT_STEPS))(files, each)


def _is_parallel(files: Files) -> bool:
    return files.shape("mask_hidden") is not None


def _trained_depth(files: Files, each: Field[Any]) -> int:
    return told("num_depths", default=_PARALLEL_STEPS)(files, each) if _is_parallel(files) else DRAFT_STEPS


def _output_is_open(files: Files) -> bool:
    named = files.top.values.get("architectures")
    is_known = _is_parallel(files) or (isinstance(named, list) and _OF_NEMO in named)
    return not is_known and bool(files.top.flag("norm_output", False))


_OPEN = {
    "norm_output": lambda files: files.top.values.get("norm_output_told") is False,  # saved here earlier
    "norm_before_residual": ("norm_before_residual",),
}


def _mask(files: Files, each: Field[Any]) -> int | None:
    if not _is_parallel(files):
        return None
    names = ("mask_token_id", "ptd_token_id", "pard_token", f"{_OWN}.mask_token_id")  # the last but one is vLLM's
    found = told(*names, default=files.given.get("mask_token_id"))(files, each)
    if found is None:
        raise ValueError(
            "config.json names no mask_token_id, which a parallel drafter (P-EAGLE) reads: pass mask_token_id=... to "
            "from_pretrained. SpecForge trains with the tokenizer's mask token, or if it has none, with the first id "
            "that the tokenizer does not use, which is len(tokenizer)"
        )
    return found


def is_eagle4(checkpoint: AnyCheckpoint) -> bool:
    return "Eagle4" in str(checkpoint.config.get("architectures"))


def _why_refused(checkpoint: AnyCheckpoint) -> str:
    if is_eagle4(checkpoint):
        return "is an EAGLE-4 drafter, whose licence lets no other program read it: use another drafter for this target"
    kind, heads = speculators_type(checkpoint), of_target(checkpoint.shapes)
    if kind != "mtp" and not heads:
        return ""
    return (
        f"holds a target's own prediction heads ({f'speculators_model_type={kind}' if kind else few(heads)}): those "
        "are not drafted with here; expected a drafter in separate files"
    )


def _may_be_refused(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or {"hidden_size", "vocab_size"} <= config.keys()


def _is_eagle3(checkpoint: AnyCheckpoint) -> bool:
    """Whether the first layer reads a state and an embedding."""
    layer = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    others = speculators_type(checkpoint) or is_eagle4(checkpoint)
    return not others and any(name in checkpoint.shapes for name in layer)


def of_target(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if "eh_proj" in name or name.startswith(("mtp.", "mtp_layers."))]


def _has_head(files: Files, _: Any) -> bool:
    """Whether there are output rows: their own, or the embedding's (`not_among_weights`). A part of them must be."""
    top, usual = files.top, USUAL_DRAFTED if speculators_type(files.checkpoint) else None
    tied = top.values.get("tie_word_embeddings") is True and files.shape("embed_tokens.weight") is not None
    is_whole = top.values.get("draft_vocab_size", usual) in (None, files.layers.values.get("vocab_size"))
    return files.shape("lm_head.weight") is not None or tied or not is_whole


def _read_taps(files: Files, each: Field[Any]) -> tuple[int, ...] | None:
    """The hidden states: those named, or without `fc` the last one, or the last of which only the number is known."""
    if files.shape("fc.weight") is None:
        return (-1,)
    ids = {_IDS: 0, f"{_OWN}.{_IDS}": 1, "target_layer_ids": 1}
    return taps(ids, None, least=-1, is_sorted=True)(files, each)


def _shown_twice(name: str) -> Row:
    """The row of whether a product reads twice the width of states."""
    return lambda files, _: (files.shape(name) or (0, 0))[-1] == 2 * files.top.integer("hidden_size")


COMMON = {
    "windows": _windows,
    "rope": rope(in_part=True),
    **same("norm_before_residual", "norm_output", "logit_scale", default=OURS),
    "own_embedding": shown("embed_tokens.weight"),
    "fc_bias": shown("fc.bias"),
    "own_head": _has_head,
}
_OF_SPECULATORS = {
    **COMMON,
    "target_tap_layers": taps({_IDS: 0}, None),
    **same("norm_before_fc", "fc_norm", default=OURS),
    "num_draft_steps": proposed,
}
TYPES = ("qwen3", "llama")  # of layers; the first one is the usual
IGNORED = tuple(FOREIGN["of EAGLE"])
EXPECTED = {name: neutral for name, (neutral, _) in FOREIGN["changing EAGLE"].items()}

_OF_FILES = {
    **COMMON,
    **same("vocab_size"),
    "target_hidden_size": told("target_hidden_size", "hidden_size"),
    "sizes": _sizes,
    "num_hidden_layers": layers,
    "draft_vocab_size": told("draft_vocab_size", "vocab_size"),
    "target_tap_layers": _read_taps,
    "last_tap_is_normed": lambda files, _: files.shape("fc.weight") is None,
    "has_fc": shown("fc.weight"),
    "all_read_embeddings": _shown_twice("layers.1.self_attn.q_proj.weight"),
    "norm_before_fc": shown("input_norm.weight"),
    "fc_norm": shown("fc_norm.0.weight"),
    "mask_token_id": _mask,
    "num_draft_steps": _trained_depth,
}


def _scaled(files: Files, config: EagleConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gemma's embeddings are multiplied by the root of their width."""
    table = state["embed_tokens.weight"]
    return {**state, "embed_tokens.weight": table * table.shape[1] ** 0.5}


FORMATS = (
    *(
        speculators(
            kind,
            EagleDrafter,
            {**_OF_SPECULATORS, **own},
            with_defaults=TYPES,
            ignored=IGNORED,
            expected=EXPECTED,
            open=opened,
        )
        for kind, own, opened in (("eagle3", {}, _OPEN), ("peagle", same("mask_token_id"), {}))
    ),
    PublishedFormat(
        "EAGLE-3",
        70,
        _is_eagle3,
        EagleDrafter,
        _OF_FILES,
        ignored=IGNORED,
        expected=EXPECTED,
        tensors={
            "layers.0.": ("midlayer.",),
            **{f"fc_norm.{index}.": (f"aux_norm_{name}.",) for index, name in enumerate(("low", "mid", "high"))},
        },
        checked=(_OWN,),
        open={
            "norm_output": _output_is_open,
            "norms_state_twice": lambda files: "next_layer_regular" in files.table(_OWN),
        },
        given={"mask_token_id": 0},
        needed=("hidden_size", "vocab_size"),
    ),
    PublishedFormat(
        "DeepSpec EAGLE-3 of Gemma 4",
        69,
        lambda checkpoint: _is_eagle3(checkpoint) and "layers.0.layer_scalar" in checkpoint.shapes,
        EagleDrafter,
        {
            **_OF_FILES,
            "sizes": gemma_sizes,
            "windows": lambda files, _: (None,) * layers(files),
            "rope": rope("full_attention"),
            "own_embedding": True,
            "all_read_embeddings": True,
            **same("final_logit_softcapping", default=OURS),
        },
        ignored=(*IGNORED, "attention_k_eq_v"),
        expected={**OF_GEMMA, **EXPECTED},
        converted=_scaled,
        needed=("target_layer_ids", "vocab_size"),
    ),
)

for _form in FORMATS:
    _form.register()
register_refusal("EAGLE-4, heads of a target", 72, _why_refused, _may_be_refused)
