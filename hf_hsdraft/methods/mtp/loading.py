"""Loads a target's layers for multi-token prediction from its checkpoint, or from files that hold them alone."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import CONFIG_NAME, ContextManagers

from ...core.checks import few, printable
from ...core.forks import new_lock
from ...core.refusals import DraftingRefused
from ...hub.drafter_files import read_json
from ..published.checkpoint import AnyCheckpoint
from .kinds import EMBEDDING, UNABLE, Kind, described_target, kind_of, layers_in, renamed
from .layers import MtpLayers, last_place, tie

_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD = re.compile(r"model\.layers\.(\d+)\.shared_head\.head\.weight")

_loaded: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], MtpLayers]] = weakref.WeakKeyDictionary()
_lock = new_lock()


def layers_of(target: Any, **hub: Any) -> MtpLayers:
    """Returns a target's layers, read from the checkpoint it was loaded from, once for each target and `hub`.

    Raises a DraftingRefused if it has none, or layers that cannot draft here. `hub` as in `MtpDrafter.for_target`.
    """
    place = tuple(str(hub.get(name) or "") for name in ("cache_dir", "revision"))
    with _lock:
        known = _loaded.setdefault(target, {})
        if place not in known:
            known[place] = _read(target, hub)
        return known[place]


def layers_alone(target: Any, checkpoint: AnyCheckpoint, kind: Kind | None = None) -> MtpLayers:
    """Returns layers for a target from a checkpoint that holds nothing else; raises as `layers_of`."""
    _check_kind(target)
    return _read_from(target, checkpoint.name, lambda: checkpoint, True, kind)


def _read(target: Any, hub: Mapping[str, Any]) -> MtpLayers:
    """The layers in the checkpoint that a target was loaded from; `hub` as in `layers_of`."""
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

    def checkpoint() -> AnyCheckpoint:
        folder = folder_of(target, hub)
        return AnyCheckpoint(place, folder, read_json(folder / CONFIG_NAME))

    layers = _read_from(target, place, checkpoint)
    layers.folder = folder_of(target, hub)
    return layers


def _check_kind(target: Any) -> None:
    if unable := UNABLE.get(target.config.get_text_config().model_type):
        raise DraftingRefused(f"this {type(target).__name__} may have layers for multi-token prediction, but {unable}")


def _read_from(
    target: Any,
    place: Any,
    checkpoint: Callable[[], AnyCheckpoint],
    apart: bool = False,
    kind: Kind | None = None,
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


def _from_files(target: Any, checkpoint: AnyCheckpoint, apart: bool, kind: Kind) -> MtpLayers:
    """Loads the layers from a checkpoint, dequantised; raises a ValueError if some tensors are missing."""
    names, place = renamed(checkpoint.shapes, target.config, apart, kind), last_place(target)
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
        model = seen.model()
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
    tie(model, target)
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
