"""Reads published EAGLE-3 formats into one configuration.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from ...core.checks import are_ascending, few, printable
from ...core.fields import Fields
from ...hub.checkpoint import Checkpoint
from ...hub.speculators_format import check_proposals, speculators_type, target_of
from ..base.formats import fields_told
from ..base.layer_fields import MOST_LAYERS, drafted_ids, read_rope, read_sizes, read_windows
from ..base.target_info import Fit, TargetInfo, fit_of
from .configuration import DRAFT_STEPS, EagleConfig

KINDS = ("eagle3", "peagle")  # in speculators
_LAYER_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_IDS = "eagle_aux_hidden_state_layer_ids"
# Switches without effect here: on training, caches, and the class that saved the file.
_HARMLESS = ("use_cache", "tie_word_embeddings", "embed_requires_grad", "return_dict", "has_no_defaults_at_init")
# From copies of a Hunyuan target's configuration. AngelSlim's class always rotates; tensors show the query norms.
_OF_HUNYUAN = ("use_qk_norm", "use_rotary_pos_emb")
_PARALLEL_STEPS = 8  # SpecForge's and NeMo's training depth of parallel drafters, if the files lack it
_OF_NEMO = "LlamaEagle3DraftModel"


@dataclass(frozen=True)
class Reading:
    """A drafter's configuration, and the names of its tensors."""

    checkpoint: Checkpoint
    config: EagleConfig  # lacks the ids of the draft vocabulary, which are a tensor
    first_layer: str = "layers.0"  # the files' name of the first layer

    def check(self, drafter: nn.Module) -> None:
        """Raises a ValueError if names or shapes of tensors do not match `drafter`, which may be on the meta device."""
        wanted = {self._in_files(name): tuple(each.shape) for name, each in drafter.named_parameters()}
        if self.tied_head:
            del wanted["lm_head.weight"]
        size, vocabulary = self.config.draft_vocab_size, self.config.vocab_size
        maps = {"d2t": (size,), "t2d": (vocabulary,)}
        needed = {"d2t": (size,)} if size < vocabulary else {}
        self.checkpoint.check_shapes({**wanted, **needed}, maps)

    def state(self, drafter: nn.Module, kind: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Returns the parameters by name from the files, as dtype `kind`; None for the dtype of the files."""
        names = {self._in_files(name): name for name, _ in drafter.named_parameters()}
        state = {names[name]: tensor for name, tensor in self.checkpoint.tensors(names.keys())}
        if self.tied_head:
            state["lm_head.weight"] = state["embed_tokens.weight"].clone()
        kind = state["fc.weight"].dtype if kind is None else kind
        return {name: tensor.to(kind) for name, tensor in state.items()}

    @property
    def tied_head(self) -> bool:
        """Whether the head is the drafter's embedding, as SGLang reads files without a head."""
        fields, config = self.checkpoint.config, self.config
        told = fields.get("tie_word_embeddings") is True and config.own_embedding
        return told and "lm_head.weight" not in self.checkpoint.shapes and config.draft_vocab_size == config.vocab_size

    def complete_config(self) -> EagleConfig:
        """Returns the configuration with the ids of the draft vocabulary; raises a ValueError as `drafted_ids`."""
        config = self.config
        if config.draft_vocab_size == config.vocab_size:  # maps mean nothing then
            return config
        ids = drafted_ids(self.checkpoint, config.vocab_size)
        return replace(config, draft_vocab_ids=tuple(ids.tolist()))

    def _in_files(self, name: str) -> str:
        return name.replace("layers.0.", f"{self.first_layer}.") if name.startswith("layers.0.") else name


def is_speculators(checkpoint: Checkpoint) -> bool:
    """Whether these are files of speculators' EAGLE family; unreadable members are refused by name later."""
    return speculators_type(checkpoint) in (*KINDS, "eagle", "mtp")


def is_eagle4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-4 drafter, which is refused."""
    return "Eagle4" in str(config.get("architectures"))


def refuse_eagle4(checkpoint: Checkpoint, **_: Any) -> Any:
    """Raises a ValueError that says why an EAGLE-4 drafter is not read."""
    raise ValueError(
        f"{printable(checkpoint.name)} is an EAGLE-4 drafter: the licence of its authors' code (Eagle 4 "
        "Source-Available License, section 3) requires a separate agreement for other drafting software, so it is not "
        "read here; expected an EAGLE-3 drafter"
    )


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Whether these are files of another project's EAGLE drafter, or of a prediction head inside a target."""
    names = checkpoint.shapes
    return _has_eagle3_layer(names) or _is_older(names) or _is_inside_target(names)


def read(checkpoint: Checkpoint, mask_token_id: int | None = None) -> Reading:
    """Reads files of any format; `mask_token_id` is for those that lack it. Raises a ValueError for wrong fields."""
    if speculators_type(checkpoint):
        return _read_speculators(checkpoint)
    return _read_eagle(checkpoint, mask_token_id)


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    told = fields_told(checkpoint)
    try:
        config = read(checkpoint, mask_token_id=0).config
    except ValueError as error:
        return {**told, "cannot be loaded": printable(error, 400)}
    if not config.norm_output_told:
        told["state fed back"] = (
            "not told by norm_output=true: the first calls try both readings; `hsdraft info --target` tells which is "
            "taken"
        )
    elif config.mask_token_id is None:
        told["state fed back"] = "after the norm (EAGLE-3.1)" if config.norm_output else "before the norm (EAGLE-3)"
    return told


def fit(checkpoint: Checkpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """Returns how well a checkpoint fits a target, see `Format.fit`; raises as `read`."""
    return fit_of(read(checkpoint, mask_token_id=0).config, target, named)


def _read_speculators(checkpoint: Checkpoint) -> Reading:
    kind, fields = speculators_type(checkpoint), Fields(checkpoint.config, "config.json")
    if kind not in KINDS:
        raise ValueError(
            f"{printable(checkpoint.name)} has speculators_model_type={printable(kind)}: expected one of "
            f"{', '.join(KINDS)}; EAGLE-1, EAGLE-2 and MTP heads are not drafted with here"
        )
    check_proposals(fields)
    given = fields.table("transformer_layer_config")
    layer = Fields(_with_defaults(given), given.place)
    target_name, target_architectures = target_of(checkpoint.config)
    parallel = kind == "peagle"
    config = _config(
        checkpoint,
        fields,
        layer,
        num_hidden_layers=layer.integer("num_hidden_layers", most=MOST_LAYERS),
        draft_vocab_size=fields.integer("draft_vocab_size", 32000),
        target_tap_layers=_ascending(fields, _IDS, 0),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        norm_output_told=fields.flag("norm_output_told", True),
        mask_token_id=fields.integer("mask_token_id", least=0) if parallel else None,
        num_draft_steps=_steps(fields, parallel),
        target_name=target_name,
        target_architectures=target_architectures,
    )
    return Reading(checkpoint, config)


def _read_eagle(checkpoint: Checkpoint, mask_token_id: int | None = None) -> Reading:
    shapes, fields = checkpoint.shapes, Fields(checkpoint.config, "config.json")
    _refuse_others(checkpoint)
    first = "midlayer" if "midlayer.hidden_norm.weight" in shapes else "layers.0"
    parallel, named = "mask_hidden" in shapes, fields.values.get("architectures")
    told = parallel or (isinstance(named, list) and _OF_NEMO in named)
    # The tensors decide about these.
    fields.ignore(*_OF_HUNYUAN, "fc_norm", "norm_before_fc", "parallel_drafting")
    config = _config(
        checkpoint,
        fields,
        fields,
        first,
        num_hidden_layers=1 + max((int(name.split(".")[1]) for name in shapes if _is_of_layer(name)), default=0),
        draft_vocab_size=fields.integer("draft_vocab_size", fields.integer("vocab_size")),
        target_tap_layers=_named_taps(fields),
        norm_before_fc="input_norm.weight" in shapes,
        fc_norm="fc_norm.0.weight" in shapes,
        norm_output_told=told or not fields.flag("norm_output", False),
        mask_token_id=_mask_token(fields, mask_token_id) if parallel else None,
        num_draft_steps=fields.integer("num_depths", _PARALLEL_STEPS, most=64) if parallel else DRAFT_STEPS,
    )
    return Reading(checkpoint, config, first)


def _config(
    checkpoint: Checkpoint, fields: Fields, layer: Fields, first: str = "layers.0", **further: Any
) -> EagleConfig:
    """Reads what all formats tell alike, and refuses switches that are not read.

    Args:
        fields: config.json.
        layer: the part of it about layers.
        first: the files' name of the first layer. The tensors show biases, norms of queries and keys, and embeddings.
        further: fields that formats tell differently.
    """
    names, count = checkpoint.shapes, further["num_hidden_layers"]
    layer.ignore("attention_bias", "qkv_bias")
    sizes = read_sizes(
        layer,
        attention_bias=f"{first}.self_attn.q_proj.bias" in names,
        output_bias=f"{first}.self_attn.o_proj.bias" in names,
        qk_norm=f"{first}.self_attn.q_norm.weight" in names,
    )
    config = EagleConfig(
        layer=sizes,
        vocab_size=layer.integer("vocab_size"),
        target_hidden_size=fields.integer("target_hidden_size", sizes.hidden_size),
        windows=_windows(layer, count),
        rope=read_rope(layer),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_output=fields.flag("norm_output", False),
        own_embedding="embed_tokens.weight" in names,
        **further,
    )
    for each in (fields, layer):
        each.ignore(*_HARMLESS)
        each.refuse_unread()
    return config


def _mask_token(fields: Fields, given: int | None) -> int:
    """The token whose embedding the deeper rows of a parallel drafter read."""
    place = fields.table("eagle_config", None) or fields
    own = fields.integer("mask_token_id", place.integer("mask_token_id", given, least=0), least=0)
    if own is None:
        raise ValueError(
            "config.json names no mask_token_id, which a parallel drafter (P-EAGLE) reads: pass mask_token_id=... to "
            "from_pretrained. SpecForge trains with the tokenizer's mask token, or if it has none, with the first id "
            "that the tokenizer does not use, which is len(tokenizer)"
        )
    return own


def _refuse_others(checkpoint: Checkpoint) -> None:
    name, shapes = printable(checkpoint.name), checkpoint.shapes
    if _is_inside_target(shapes) and not _has_eagle3_layer(shapes):
        heads = [each for each in shapes if "eh_proj" in each or each.startswith("mtp")]
        raise ValueError(
            f"{name} holds a target's own prediction heads ({few(heads)}): those are not drafted with here; expected "
            "an EAGLE-3 drafter in files of its own"
        )
    if not _has_eagle3_layer(shapes):
        raise ValueError(
            f"{name} is an EAGLE-1 or EAGLE-2 drafter: it reads one hidden state, and has no hidden_norm. Only EAGLE-3 "
            "is drafted with here; expected a drafter with hidden_norm and the hidden states of several layers"
        )


def _has_eagle3_layer(names: Mapping[str, Any]) -> bool:
    layer = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    return "fc.weight" in names and any(name in names for name in layer)


def _is_older(names: Mapping[str, Any]) -> bool:
    own = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
    return own <= names.keys() and not any("hidden_norm" in name for name in names)


def _is_inside_target(names: Mapping[str, Any]) -> bool:
    return any("eh_proj" in name or name.startswith(("mtp.", "mtp_layers.")) for name in names)


def _is_of_layer(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "layers" and len(parts) > 2 and parts[1].isdigit() and len(parts[1]) < 4


def _with_defaults(layer: Fields) -> dict[str, Any]:
    """The layer fields with the defaults of transformers' class, which speculators leaves out."""
    kind = _LAYER_CONFIGS[layer.choice("model_type", tuple(_LAYER_CONFIGS), "qwen3")]
    rope = read_rope(layer)  # before transformers replaces some invalid values
    given = {name: value for name, value in layer.values.items() if name != "model_type"} | rope
    try:
        return kind(**given).to_dict()
    except Exception as error:  # transformers raises various types for wrong values
        expected = f"expected fields of a {kind.__name__}"
        raise ValueError(f"{layer.place} is invalid ({printable(error)}): {expected}") from error


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; only sliding layers have one."""
    kinds = fields.values.get("layer_types")
    fields.ignore("use_sliding_window")
    if kinds is None or (isinstance(kinds, list) and "sliding_attention" not in kinds):
        return (None,) * layers
    return read_windows(fields, kinds, layers)


def _named_taps(fields: Fields) -> tuple[int, ...] | None:
    """The hidden states that the files name in one of three ways; None if they do not."""
    of_authors = _ascending(fields, _IDS, 0)
    of_specforge = _ascending(fields.table("eagle_config", Fields({}, "config.json, eagle_config")), _IDS, 1)
    of_deepspec = _ascending(fields, "target_layer_ids", 1, least=-1)
    found = {taps for taps in (of_authors, of_specforge, of_deepspec) if taps is not None}
    if len(found) > 1:
        raise ValueError(
            f"config.json names different hidden states ({' and '.join(map(str, sorted(found)))}): expected one of "
            f"{_IDS}, eagle_config.{_IDS} and target_layer_ids"
        )
    return found.pop() if found else None


def _ascending(fields: Fields, name: str, offset: int, least: int = 0) -> tuple[int, ...] | None:
    """Hidden states of numbered layers; they differ by `offset`."""
    if fields.values.get(name) == []:  # all projects that write it mean a missing one
        return None
    ids: Sequence[int] | None = fields.integers(name, None, least=least, most=4096)
    if ids is None:
        return None
    if not are_ascending(ids, least, 4096):
        raise ValueError(
            f"{name}={ids} in {fields.place} is invalid: expected ascending numbers, each once; other readers sort "
            "them, and then the hidden states would stand in another order than the columns of fc"
        )
    return tuple(number + offset for number in ids)


def _steps(fields: Fields, parallel: bool) -> int:
    """The greatest draft depth; only files written by this package name it.

    Other files name the number of tokens proposed at once. For a parallel drafter this is its training depth; an
    autoregressive one may go deeper than that serving default.
    """
    proposals = fields.table("speculators_config", Fields({}, "")).values.get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    place = "config.json, speculators_config.proposal_methods"
    own = Fields(first if isinstance(first, dict) else {}, place)
    proposed = own.integer("speculative_tokens", DRAFT_STEPS, most=64)
    return fields.integer("num_draft_steps", proposed if parallel else max(proposed, DRAFT_STEPS), most=64)
