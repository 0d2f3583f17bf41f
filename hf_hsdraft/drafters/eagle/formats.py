"""Published formats of EAGLE-3 drafters, as tables.

| format | written by | hidden states it names |
|---|---|---|
| speculators `eagle3`, `peagle` | vLLM's package speculators | `eagle_aux_hidden_state_layer_ids`, as written |
| EAGLE-3 | its authors | none: 2, L // 2 and L - 3 |
| EAGLE-3, P-EAGLE | SpecForge, AngelSlim, ModelOpt | `eagle_config.eagle_aux_hidden_state_layer_ids`, plus one |
| EAGLE-3, P-EAGLE | NeMo AutoModel | none, as its authors |
| EAGLE-3 | DeepSpec | `target_layer_ids`, plus one |

Tensors have the network's parameter names, except that the first layer may be called `midlayer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from ...core.checks import few, printable
from ...core.fields import Fields
from ...hub.checkpoint import Checkpoint
from ...hub.speculators_format import speculators_type
from ..base.published_format import (
    OURS,
    Files,
    PublishedFormat,
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
from .configuration import DRAFT_STEPS
from .drafter import EagleDrafter

_IDS = "eagle_aux_hidden_state_layer_ids"
_OF_NEMO = "LlamaEagle3DraftModel"
_PARALLEL_STEPS = 8  # SpecForge's and NeMo's training depth of parallel drafters, if the files lack it


def _layers(files: Files, _: Any = None) -> int:
    """The number of layers that have tensors: the files of some projects give the target's."""
    names = [name.split(".") for name in files.checkpoint.shapes]
    numbers = [int(name[1]) for name in names if name[0] == "layers" and len(name) > 2 and name[1].isdigit()]
    return 1 + max(numbers, default=0)


def _windows(files: Files, _: Any) -> tuple[int | None, ...]:
    """The window of each layer; only layers of the type have one."""
    count = files.layers.integer("num_hidden_layers", 1) if files.form.layers else _layers(files)
    return read_windows(files.layers, count, by_types_alone=True)


def _proposed(files: Files, each: Field[Any]) -> int:
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
    found = told("mask_token_id", "eagle_config.mask_token_id", default=files.given.get("mask_token_id"))(files, each)
    if found is None:
        raise ValueError(
            "config.json names no mask_token_id, which a parallel drafter (P-EAGLE) reads: pass mask_token_id=... to "
            "from_pretrained. SpecForge trains with the tokenizer's mask token, or if it has none, with the first id "
            "that the tokenizer does not use, which is len(tokenizer)"
        )
    return found


def _refuse(checkpoint: Checkpoint, **_: Any) -> Any:
    """Raises a ValueError for a drafter of another generation, or the heads of a target."""
    name, heads = printable(checkpoint.name), _of_target(checkpoint.shapes)
    if speculators_type(checkpoint):
        raise ValueError(
            f"{name} has speculators_model_type={speculators_type(checkpoint)}: expected one of eagle3, peagle; "
            "EAGLE-1, EAGLE-2 and MTP heads are not drafted with here"
        )
    if heads:
        raise ValueError(
            f"{name} holds a target's own prediction heads ({few(heads)}): those are not drafted with here; expected "
            "an EAGLE-3 drafter in files of its own"
        )
    raise ValueError(
        f"{name} is an EAGLE-1 or EAGLE-2 drafter: it reads one hidden state, and has no hidden_norm. Only EAGLE-3 is "
        "drafted with here; expected a drafter with hidden_norm and the hidden states of several layers"
    )


def _may_be_refused(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or {"hidden_size", "vocab_size"} <= config.keys()


def _is_refused(checkpoint: Checkpoint) -> bool:
    if kind := speculators_type(checkpoint):
        return kind in ("eagle", "mtp")
    names = checkpoint.shapes
    older = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names.keys()
    return bool(_of_target(names)) or (older and not any("hidden_norm" in name for name in names))


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether the first layer reads a state and an embedding; the licence of EAGLE-4 lets no other program read it."""
    layer = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    names = checkpoint.shapes
    others = speculators_type(checkpoint) or "Eagle4" in str(checkpoint.config.get("architectures"))
    return not others and "fc.weight" in names and any(name in names for name in layer)


def _of_target(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if "eh_proj" in name or name.startswith(("mtp.", "mtp_layers."))]


_COMMON = {
    "windows": _windows,
    "rope": rope(),
    **same("norm_before_residual", "norm_output", default=OURS),
    "own_embedding": shown("embed_tokens.weight"),
}
# Switches without effect here: on training, caches, and the class that saved the file.
_HARMLESS = ("embed_requires_grad", "has_no_defaults_at_init")
_OF_SPECULATORS = {
    **_COMMON,
    "target_tap_layers": taps({_IDS: 0}, None),
    **same("norm_before_fc", "fc_norm", default=OURS),
    "num_draft_steps": _proposed,
}
# From copies of a Hunyuan target's configuration: AngelSlim's class always rotates.
_OF_HUNYUAN = ("use_qk_norm", "use_rotary_pos_emb")
_TYPES = ("qwen3", "llama")  # of layers; the first one is the usual

FORMATS = (
    *(
        speculators(
            kind, EagleDrafter, {**_OF_SPECULATORS, **own}, with_defaults=_TYPES, ignored=_HARMLESS, open=opened
        )
        for kind, own, opened in (("eagle3", {}, _OPEN), ("peagle", same("mask_token_id"), {}))
    ),
    PublishedFormat(
        "EAGLE-3",
        70,
        _is_eagle3,
        EagleDrafter,
        {
            **_COMMON,
            **same("vocab_size"),
            "target_hidden_size": told("target_hidden_size", "hidden_size"),
            "sizes": sizes,
            "num_hidden_layers": _layers,
            "draft_vocab_size": told("draft_vocab_size", "vocab_size"),
            "target_tap_layers": taps({_IDS: 0, f"eagle_config.{_IDS}": 1, "target_layer_ids": 1}, None, least=-1),
            "norm_before_fc": shown("input_norm.weight"),
            "fc_norm": shown("fc_norm.0.weight"),
            "mask_token_id": _mask,
            "num_draft_steps": _trained_depth,
        },
        # The tensors decide about norms.
        ignored=(*_HARMLESS, *_OF_HUNYUAN, "fc_norm", "norm_before_fc", "parallel_drafting"),
        tensors={"layers.0.": ("midlayer.",)},
        open={"norm_output": _output_is_open},
        given={"mask_token_id": 0},
        needed=("hidden_size", "vocab_size"),
    ),
)

for _form in FORMATS:
    _form.register()
register_format(Format("EAGLE-1, EAGLE-2", 71, _is_refused, _refuse, possible=_may_be_refused, loads=False))
