"""A target's own layers for multi-token prediction: loaded from its checkpoint, and run over our buffers.

A *column* is what the layers make of one token of a text. In the column of x_p, layer k reads the embedding of x_p and
the output of layer k - 1 in the column of x_{p-1}, layer 0 the target's hidden state h_{p-1}; its output predicts
x_{p+1}. So these are the pairs that `transformers.modeling_layers.MtpModel` computes, sorted by token
(DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
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
from .kinds import (
    ATTENTION,
    EMBEDDING,
    INDEXED,
    SLIDING,
    UNABLE,
    Kind,
    described_target,
    kind_of,
    layers_in,
    renamed,
)

_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
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
        folder: of the target's checkpoint that they were read from.
    """

    folder: Path | None = None

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
        if normed == self._hands_on_normed:
            return self
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

    layers = _read_from(target, place, checkpoint)
    layers.folder = folder_of(target, hub)
    return layers


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
    numbers = layer_numbers(names, target.config)
    if not numbers and not apart:
        raise ValueError(
            f"weights are missing: the configuration counts {layers_in(target.config)}, but it was saved without "
            'their tensors: load the original checkpoint, or use assistant_model="ngrams"'
        )
    if not numbers or numbers != set(range(len(numbers))):
        some = ", ".join(map(str, sorted(numbers))) or "none"
        raise ValueError(f"weights are missing: found layers {some}, expected {layers_in(target.config)}, from 0 on")
    seen = described_target(target, len(numbers), kind)
    with ContextManagers(MtpModel.get_init_context(dtype, False, False, None)):
        model = MtpModel(seen, len(numbers))
    state = {names[name]: tensor for name, tensor in checkpoint.tensors(names.keys())}
    rows = state.pop(EMBEDDING, None)
    table = None if rows is None else nn.Embedding.from_pretrained(rows.to(place, dtype))
    found = {int(layer[1]) - first: state.pop(name) for name in list(state) if (layer := _HEAD.fullmatch(name))}
    loading = LoadStateDictConfig(
        weight_mapping=model.get_weight_conversions(seen), device_map={"": place}, dtype=dtype
    )
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=state, load_config=loading)
    model._adjust_missing_and_unexpected_keys(info)
    if info.missing_keys or info.unexpected_keys or info.mismatched_keys:
        missing = [_in_files(name, names) for name in info.missing_keys]
        wrong = {"missing": missing, "unknown": info.unexpected_keys, "of other shapes": info.mismatched_keys}
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


def layer_numbers(names: Mapping[str, str], config: Any) -> set[int]:
    """The layers that tensors belong to, by their names as `renamed` returns them; 0 is the first."""
    first = config.get_text_config().num_hidden_layers
    return {int(layer[1]) - first for each in names.values() if (layer := _NUMBER.match(each))}


def _in_files(name: str, names: Mapping[str, str]) -> str:
    """How the files would name a tensor, after another one of its layer that they name as DeepSeek's do."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    beginnings = dict.fromkeys(match[0] for each in names if (match := re.match(r"(?:\w+\.)*?layers\.\d+\.", each)))
    number = int(layer[1]) if layer else 0
    if layer is None or number >= len(beginnings):
        return name
    return sorted(beginnings, key=lambda each: int(each.rsplit(".", 2)[-2]))[number] + layer[2]


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
