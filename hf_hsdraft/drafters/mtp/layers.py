"""A target's own layers for multi-token prediction: loaded from its checkpoint, and run over our buffers.

A *column* is what the layers make of one token of a text. In the column of x_p, layer k reads the embedding of x_p and
the output of layer k - 1 in the column of x_{p-1}, layer 0 the target's hidden state h_{p-1}; its output predicts
x_{p+1}. So these are the pairs that `transformers.modeling_layers.MtpModel` computes, sorted by token
(DeepSeek-V3, section 2.2).

transformers' `MtpModel` reads the names of DeepSeek's and Qwen's files. A row of `KINDS` says how others are renamed,
and what differs from a layer with full attention between `eh_proj([enorm(embedding), hnorm(state)])` and a norm.
"""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import CONFIG_NAME, ContextManagers

from ...core.cache_name import CACHE
from ...core.checks import few, printable
from ...core.forks import new_lock
from ...core.refusals import DraftingRefused
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import read_json
from .blocks import DecoderOf, parts_in_turn, place_of_part, single_attention

ATTENTION, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"


@dataclass(frozen=True)
class Kind:
    """The layers of a model type."""

    source: str  # file of vLLM 0.32, in `vllm/model_executor/models/`, that reads them likewise
    names: tuple[tuple[str, str], ...] = ()  # beginnings of tensors' names within a layer, and what is read instead
    counted_by: str = "num_nextn_predict_layers"  # field of the configuration that counts them
    uncounted: int = 0  # their number where it has no such field
    attention: str | None = ATTENTION  # None for the types of the model's first layers
    mlp: str = "sparse"  # where some layers of the model are mixtures of experts
    states_first: bool = False  # whether `eh_proj` reads the state before the embedding
    normed: bool = True  # whether a norm follows the layer
    hands_on_normed: bool = True  # whether the next layer reads the normed output
    own_heads: bool = False  # whether each layer has its own output head
    own_embedding: bool = False  # whether they read their own embeddings
    untold: tuple[str, ...] = ()  # questions (`base/readings.py`) that its reference implementations answer differently
    block: Callable[[Any], type[nn.Module]] | None = None  # makes the class of its decoder layer; None for the target's
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the layers' configuration


_FINAL = (("final_layernorm.", "shared_head.norm."),)
_HANDED_ON = ("hands_on_normed",)
_QWEN = Kind("qwen3_5_mtp.py", counted_by="mtp_num_hidden_layers", uncounted=1)
KINDS = {
    "qwen3_next": _QWEN, "qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN,
    "glm4_moe": Kind("glm4_moe_mtp.py", untold=_HANDED_ON),
    "exaone_moe": Kind("exaone_moe_mtp.py", mlp="dense"),
    "exaone4_5": Kind("exaone4_5_mtp.py", uncounted=1, attention=None),
    "glm4_moe_lite": Kind("glm4_moe_lite_mtp.py", untold=_HANDED_ON),
    "glm_ocr_text": Kind("glm_ocr_mtp.py", untold=_HANDED_ON),
    "deepseek_v32": Kind("deepseek_mtp.py", attention=INDEXED),
    "glm_moe_dsa": Kind("deepseek_mtp.py", attention=INDEXED),
    "hy_v3": Kind("hy_v3_mtp.py", _FINAL),
    "bailing_hybrid": Kind("bailing_moe_mtp.py", _FINAL, counted_by="num_mtp_layers"),
    "mimo": Kind("mimo_mtp.py", (
        ("token_layernorm.", "enorm."), ("hidden_layernorm.", "hnorm."), ("input_proj.", "eh_proj."), *_FINAL,
    ), states_first=True),
    "mimo_v2_flash": Kind("mimo_v2_mtp.py", (
        ("pre_mlp_layernorm.", "post_attention_layernorm."), *_FINAL,
    ), uncounted=3, attention=SLIDING, mlp="dense"),
    "ernie4_5_moe": Kind("ernie_mtp.py", (
        ("mtp_emb_norm.", "enorm."), ("mtp_hidden_norm.", "hnorm."), ("mtp_linear_proj.", "eh_proj."),
    ), normed=False, fields={"moe_layer_start_index": 2**30}),  # no experts
    "hy_v4": Kind("../../models/hy_v4/nvidia/mtp.py", _FINAL, attention=INDEXED, block=single_attention,
                  fields={"indexer_types": ["full"] * 8}),
    "dots3_note_text": Kind("../../models/dots3_note/nvidia/mtp.py", attention=SLIDING, own_embedding=True),
    "longcat_flash": Kind("longcat_flash_mtp.py", (
        ("enorm.m.", "enorm."), ("hnorm.m.", "hnorm."), ("transformer_layer.", ""),
    ), uncounted=1, block=single_attention),
    "nemotron_h": Kind("nemotron_h_mtp.py", _FINAL, block=parts_in_turn),
    "step3p5": Kind("step3p5_mtp.py", (
        ("transformer.", ""), ("shared_head.output.", "shared_head.head."),
    ), mlp="dense", hands_on_normed=False, own_heads=True),
}  # fmt: skip

# The package speculators names the parts of all types alike.
OF_SPECULATORS = Kind("speculators", (
    ("token_layernorm.", "enorm."), ("hidden_layernorm.", "hnorm."), ("input_proj.", "eh_proj."), *_FINAL,
), uncounted=1, untold=("last_tap_is_normed",))  # fmt: skip

# Types whose files may hold such layers that no class of transformers computes.
UNABLE = {
    "deepseek_v4": "mix several streams of hidden states",
    "qwen4_exp_text": "mix several streams of hidden states",
    "glm5_next_text": "choose groups of keys in a way that is not followed by node",
    "minimax_m3_vl_text": "choose blocks of keys in a way that is not followed by node",
}

OTHERS = Kind("transformers", counted_by="num_mtp_layers")
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
# Not weights, and copies of the target's embedding and head.
_LEFT_OUT = ("rotary_emb.inv_freq", ".embed_tokens.weight", ".shared_head.weight", ".shared_head.head.weight")
_OUTSIDE = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")  # of a layer's parts
_IN_LAYER = re.compile(r"((?:\w+\.)*?)(layers|mtp_\w+)\.(\d+)\.(.+)")
_BESIDE = re.compile(r"(?:\w+\.)*?mtp\.(.+)")


def kind_of(config: Any) -> Kind:
    """Returns the row of a target's configuration."""
    return KINDS.get(config.model_type) or KINDS.get(config.get_text_config().model_type, OTHERS)


def described(config: Any, count: int | None = None, kind: Kind | None = None) -> Any:
    """Returns a copy of a target's configuration that describes its, or `count`, layers as transformers expects."""
    kind, config = kind or kind_of(config), copy.deepcopy(config)
    text = config.get_text_config()
    if count is None:
        names = ("num_mtp_layers", kind.counted_by)
        told = (getattr(each, name, None) for each in (text, config) for name in names)
        count = int(next((each for each in told if each is not None), kind.uncounted))
    text.num_mtp_layers = count
    if kind is OTHERS:
        return config
    for name, value in (("layer_types", kind.attention), ("mlp_layer_types", kind.mlp)):
        types = getattr(text, name, None)
        if types is not None and len(getattr(text, f"mtp_{name}", None) or ()) != count:
            setattr(text, f"mtp_{name}", list(types[:count]) if value is None else [value] * count)
    sizes, types = text.to_dict().get("per_layer_config"), getattr(text, "layer_types", None) or ()
    if sizes and kind.attention in types:  # of other widths
        at = types.index(kind.attention)
        text.mtp_per_layer_config = dict.fromkeys(range(count), sizes.get(at) or sizes.get(str(at)))
    text.mtp_hidden_states_first = kind.states_first
    if not hasattr(text, "rms_norm_eps"):
        text.rms_norm_eps = text.layer_norm_epsilon
    if not kind.normed:
        text.chain_hidden_post_norm = False
    for name, value in kind.fields.items():
        setattr(text, name, value)
    return config


def layers_in(config: Any) -> int:
    """Returns the number of layers for multi-token prediction that a target's configuration tells of."""
    return int(described(config).get_text_config().num_mtp_layers)


def described_target(target: Any, count: int, kind: Kind | None = None) -> Any:
    """Returns a target as transformers' `MtpModel` takes it, with so many layers."""
    return _Described(target, described(target.config, count, kind), (kind or kind_of(target.config)).block)


class _Described:
    """A target with a configuration that describes its layers for multi-token prediction as transformers expects."""

    def __init__(self, target: Any, config: Any, block: Any) -> None:
        self._target, self.config, self._block = target, config, block
        # Where the decoder is a part of a model with others, the model's conversions name it with a prefix.
        self._weight_conversions = get_model_conversion_mapping(target.get_decoder(), add_legacy=False) or None

    def get_decoder(self) -> Any:
        decoder = self._target.get_decoder()
        return decoder if self._block is None else DecoderOf(decoder, self.config.get_mtp_config(), self._block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def renamed(names: Collection[str], config: Any, apart: bool = False, kind: Kind | None = None) -> dict[str, str]:
    """Returns the tensors of the layers among `names` of a target's checkpoint, and how `MtpModel` knows them.

    Tensors of a layer become `model.layers.N.`, as in DeepSeek's files: N counts on from the target's layers. Those of
    Qwen's files that are beside the layers become `mtp.`. Files that hold these layers `apart` count from 0.
    """
    first, kind, found = config.get_text_config().num_hidden_layers, kind or kind_of(config), {}
    for name in names:
        own = (kind.own_heads and name.endswith(".head.weight")) or (kind.own_embedding and name.endswith(_EMBEDDING))
        if name.endswith(_LEFT_OUT) and not own:
            continue
        if (layer := _IN_LAYER.fullmatch(name)) is None:
            if (beside := _BESIDE.fullmatch(name)) is not None:
                found[name] = f"mtp.{beside[1]}"
            continue
        prefix, root, number, rest = layer[1], layer[2], int(layer[3]), layer[4]
        numbered_apart = apart or root != "layers" or "mtp." in prefix
        if not numbered_apart and (number < first or prefix not in _PREFIXES):
            continue
        if root not in ("layers", "mtp_layers", "mtp_block"):
            rest = f"{root}.{rest}"
        if kind.block is parts_in_turn:
            number, rest = place_of_part(config.get_text_config(), number, rest, _OUTSIDE)
        for beginning, written in kind.names:
            rest = written + rest.removeprefix(beginning) if rest.startswith(beginning) else rest
        found[name] = f"model.layers.{number + first if numbered_apart else number}.{rest}"
    return found


_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING = "mtp.embed_tokens.weight"
_HEAD = re.compile(r"model\.layers\.(\d+)\.shared_head\.head\.weight")

Write = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _Buffer:
    """What a layer takes for its cache: `write` stores keys and values `[B, heads, n, size]`, and returns all.

    Keys of an index by which a layer chooses are stored as those of another layer, `count` further on.
    """

    def __init__(self, write: Write, count: int) -> None:
        self._write, self._count = write, count

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stores keys of the index, `[B, n, size]`, and returns all."""
        return self._write(self._count + layer_idx, keys[:, None], keys[:, None, :, :0])[0][:, 0]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self._write(layer_idx, keys, values)


class MtpLayers:
    """The layers of one target; embedding, output head and rotary embedding are the target's.

    Letters in the shapes: B texts, n tokens each, P positions, D hidden size, V vocabulary.

    Attributes:
        count: number of layers.
        windows: sliding window of each layer in tokens; None for all positions.
        num_stored: number of pairs of keys and values that are stored of a position, for layers and their indexes.
        heads: output heads of the layers; None if they use the target's.
        table: embedding of the layers; None if they use the target's.
        kind: their row of `KINDS`.
    """

    def __init__(
        self,
        model: MtpModel,
        kind: Kind | None = None,
        heads: nn.ModuleList | None = None,
        table: nn.Embedding | None = None,
    ) -> None:
        self.model, self.kind, config = model, kind or kind_of(model.config), model.config
        self.heads, self.table = heads, table
        self.count = len(model.layers)
        self._hands_on_normed = self.kind.hands_on_normed
        types = list(getattr(config, "layer_types", None) or [])[: self.count] or [ATTENTION] * self.count
        if unknown := sorted({str(each) for each in types} - {ATTENTION, SLIDING, INDEXED}):
            raise DraftingRefused(
                f"the layers for multi-token prediction have the type {unknown[0]!r}, whose states of drafts are not "
                "kept by node: expected attention. transformers drafts with them: model.generate(..., use_mtp=True)"
            )
        self._types = types
        self.windows = tuple(config.sliding_window if each == SLIDING else None for each in types)
        self.num_stored = 2 * self.count if INDEXED in types else self.count
        self._has_axes = "mrope_section" in (getattr(config, "rope_parameters", None) or {})
        if config._attn_implementation != "eager":
            config._attn_implementation = "sdpa"  # takes any mask

    def handing_on(self, normed: bool) -> MtpLayers:
        """Returns the same layers, of which each reads the output of the one before after its norm, or before it."""
        made = copy.copy(self)
        made._hands_on_normed = normed
        return made

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        head = self.model.shared_head.weight.shape[0]
        return int(min(head, getattr(self.model.config, "unpadded_vocab_size", None) or head))

    @property
    def device(self) -> torch.device:
        return self.model.layers[0].eh_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.layers[0].eh_proj.weight.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings `[..., D]` of tokens `[...]`, int64."""
        table = self.model.embed_tokens if self.table is None else self.table
        return table(tokens.to(table.weight.device)).to(self.device, self.dtype)

    def logits(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns the logits `[..., V]` of a layer's outputs `[..., D]`."""
        if not self._hands_on_normed:
            states = self._normed(states, layer)
        if self.heads is not None:
            return self.heads[layer](states)
        return self.model._project_to_logits(states).to(self.device)

    def run(
        self,
        layer: int,
        embeds: torch.Tensor,  # `[B, n, D]`
        states: torch.Tensor,  # `[B, n, D]`, what they read beside their embeddings
        positions: torch.Tensor,  # `[B, n]`, int64
        mask: torch.Tensor | None,  # `[B, n, P]`, bool, True where a query may look; None for everywhere
        write: Write,
    ) -> torch.Tensor:
        """Returns a layer's outputs `[B, n, D]`, as the next layer reads them."""
        model, parts = self.model, self.model.layers[layer]
        if mask is None and self.num_stored > self.count:  # an index takes no None
            mask = embeds.new_ones(*embeds.shape[:2], 1, dtype=torch.bool)
        if mask is not None:
            hidden = torch.finfo(embeds.dtype).min
            mask = torch.zeros_like(mask, dtype=embeds.dtype).masked_fill_(~mask, hidden)[:, None]
        rotary, places = model.rotary_emb, None
        if rotary is not None:
            typed = {"layer_type": self._types[layer]} if model.has_per_layer_rope else {}
            at = positions.expand(3, -1, -1) if self._has_axes else positions  # text has the same position on all axes
            cos, sin = rotary(embeds, position_ids=at, **typed)
            places = cos.to(embeds.device), sin.to(embeds.device)
        pair = [parts.enorm(embeds), parts.hnorm(states)]
        if getattr(model.config, "mtp_hidden_states_first", False):
            pair.reverse()
        outputs = parts.mtp_block(
            parts.eh_proj(torch.cat(pair, dim=-1)),
            position_embeddings=places,
            position_ids=positions,
            attention_mask=mask,
            **{CACHE: _Buffer(write, self.count)},
        )
        made: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return self._normed(made, layer) if self._hands_on_normed else made

    def _normed(self, outputs: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns a layer's outputs behind its norm, or the one of all layers."""
        norm = self.model.layers[layer].post_norm
        if self.model.use_shared_post_norm:
            norm = self.model.shared_post_norm
        normed: torch.Tensor = outputs if norm is None else norm(outputs)
        return normed

    def follow(self, target: Any) -> None:
        """Follows a target that has been moved, or whose embedding or head has been replaced, since they were read."""
        with _following:
            place, model = _last_place(target), self.model
            # Buffers in float32 stay so if it is the same; fp8 is that of quantised weights.
            dtype = target.dtype if target.dtype != self.dtype and target.dtype.itemsize > 1 else None
            if place != self.device or dtype is not None:
                for part in self.own_parts():
                    part.to(device=place, dtype=dtype)
            if model.embed_tokens is not target.get_input_embeddings() or model.shared_head is not target.lm_head:
                model.tie_with_main_model(target)

    @classmethod
    def of(cls, target: Any, **hub: Any) -> MtpLayers:
        """Returns a target's layers, read from the checkpoint it was loaded from, once for each target and `hub`.

        Raises a DraftingRefused if it has none, or layers that cannot draft here. `hub` as in `MtpDrafter.for_target`.
        """
        place = tuple(str(hub.get(name) or "") for name in ("cache_dir", "revision"))
        with _lock:
            known = _loaded.setdefault(target, {})
            if place not in known:
                known[place] = _read(target, hub)
            return known[place]

    @classmethod
    def apart(cls, target: Any, checkpoint: Checkpoint, kind: Kind | None = None) -> MtpLayers:
        """Returns layers for a target from a checkpoint that holds nothing else; raises as `of`."""
        _check_kind(target)
        return _read_from(target, checkpoint.name, lambda: checkpoint, True, kind)

    def own_parts(self) -> list[nn.Module]:
        """The parts that are not the target's."""
        shared = [self.model.shared_post_norm] if self.model.use_shared_post_norm else []
        return [self.model.layers, *shared, *(each for each in (self.heads, self.table) if each is not None)]


_loaded: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], MtpLayers]] = weakref.WeakKeyDictionary()
_lock, _following = new_lock(), new_lock()  # calls of several threads follow their target at once


def _read(target: Any, hub: Mapping[str, Any]) -> MtpLayers:
    """The layers in the checkpoint that a target was loaded from; `hub` as in `MtpLayers.of`."""
    name = type(target).__name__
    _check_kind(target)
    if not layers_in(target.config):
        raise DraftingRefused(
            f"this {name} has no layers for multi-token prediction ({kind_of(target.config).counted_by} in its "
            "configuration): train a drafter with `hsdraft train`, or find one with `hsdraft find`"
        )
    if not (place := getattr(target.config, "name_or_path", "")):
        raise DraftingRefused(
            f"this {name} was not loaded from a checkpoint, so its layers for multi-token prediction cannot be read: "
            "load it with from_pretrained"
        )

    def checkpoint() -> Checkpoint:
        folder = folder_of(target, hub)
        return Checkpoint(place, folder, read_json(folder / CONFIG_NAME))

    return _read_from(target, place, checkpoint)


def _check_kind(target: Any) -> None:
    if unable := UNABLE.get(target.config.get_text_config().model_type):
        raise DraftingRefused(
            f"this {type(target).__name__} may have layers for multi-token prediction, but they {unable}, which is not "
            "computed here: train a drafter with `hsdraft train`, or find one with `hsdraft find`"
        )


def _read_from(
    target: Any, place: Any, checkpoint: Callable[[], Checkpoint], apart: bool = False, kind: Kind | None = None
) -> MtpLayers:
    """Reads the layers from a checkpoint; raises a DraftingRefused if that fails."""
    if any(weight.is_meta for weight in target.parameters()):
        raise DraftingRefused(
            f"this {type(target).__name__} is offloaded, and its layers for multi-token prediction need weights on a "
            "device: load it without offloading, or use another drafter"
        )
    try:
        layers = _from_files(target, checkpoint(), apart, kind or kind_of(target.config))
    except (OSError, RuntimeError, ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise DraftingRefused(
            f"the layers for multi-token prediction cannot be read from {printable(str(place))}: {error}"
        ) from error
    for part in layers.own_parts():  # the others are the target's, which may be in training
        part.eval().requires_grad_(False)
    return layers


def _from_files(target: Any, checkpoint: Checkpoint, apart: bool, kind: Kind) -> MtpLayers:
    """Loads the layers from a checkpoint, dequantised; raises a ValueError if some tensors are missing."""
    names, place = renamed(checkpoint.shapes, target.config, apart, kind), _last_place(target)
    first, dtype = target.config.get_text_config().num_hidden_layers, target.config.dtype
    numbers = {int(layer[1]) - first for each in names.values() if (layer := _NUMBER.match(each))}
    if not numbers or numbers != set(range(len(numbers))):
        some = ", ".join(map(str, sorted(numbers))) or "none"
        raise ValueError(f"weights are missing: found layers {some}, expected {layers_in(target.config)}, from 0 on")
    seen = described_target(target, len(numbers), kind)
    with ContextManagers(MtpModel.get_init_context(dtype, False, False, None)):
        model = MtpModel(seen, len(numbers))
    state = {names[name]: tensor for name, tensor in checkpoint.tensors(names.keys())}
    rows = state.pop(_EMBEDDING, None)
    table = None if rows is None else nn.Embedding.from_pretrained(rows.to(place, dtype))
    found = {int(layer[1]) - first: state.pop(name) for name in list(state) if (layer := _HEAD.fullmatch(name))}
    loading = LoadStateDictConfig(
        weight_mapping=model.get_weight_conversions(seen), device_map={"": place}, dtype=dtype
    )
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=state, load_config=loading)
    model._adjust_missing_and_unexpected_keys(info)
    if info.missing_keys or info.unexpected_keys or info.mismatched_keys:
        wrong = {"missing": info.missing_keys, "unknown": info.unexpected_keys, "of other shapes": info.mismatched_keys}
        raise ValueError("; ".join(f"{what}: {few(sorted(map(str, keys)))}" for what, keys in wrong.items() if keys))
    model.tie_with_main_model(target)
    if not kind.own_heads or not found:
        return MtpLayers(model, kind, table=table)
    heads = nn.ModuleList()
    for number in sorted(numbers):
        count, size = found[number].shape
        heads.append(nn.Linear(size, count, bias=False, device="meta"))
        heads[-1].weight = nn.Parameter(found[number].to(place, dtype))
    return MtpLayers(model, kind, heads, table)


def _last_place(target: Any) -> torch.device:
    """The device of the last decoder layer."""
    return next(weight.device for weight in next(reversed(target.get_decoder().layers)).parameters())


def folder_of(target: Any, hub: Mapping[str, Any]) -> Path:
    """The folder that a target was loaded from; a FileNotFoundError if it is gone from the cache."""
    name = target.config.name_or_path
    if os.path.isdir(name):
        return Path(name)
    # Recorded before transformers 5.24
    revision = hub.get("revision") or getattr(target.config, "_commit_hash", None)
    found = try_to_load_from_cache(name, CONFIG_NAME, cache_dir=hub.get("cache_dir"), revision=revision)
    if not isinstance(found, str):
        cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
        raise FileNotFoundError(
            f"revision {revision or 'main'} is not in the cache {cache}; give the model's own, as in "
            "MtpDrafter.for_target(model, cache_dir=..., revision=...)"
        )
    return Path(found).parent
