"""A target's own layers for multi-token prediction: loaded from its checkpoint, and run over our buffers.

A *column* is what the layers make of one token of a text. In the column of x_p, layer k reads the embedding of x_p and
the output of layer k - 1 in the column of x_{p-1}, layer 0 the target's hidden state h_{p-1}; its output predicts
x_{p+1}. So these are the pairs that `transformers.modeling_layers.MtpModel` computes, sorted by token
(DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers.modeling_layers import MtpModel
from transformers.utils import CONFIG_NAME

from ...core.cache_name import CACHE
from ...core.checks import printable
from ...core.forks import new_lock
from ...core.refusals import DraftingRefused

# Targets whose layers `mtp.layers.*` transformers leaves out though its `MtpModel` fits them, and the field that counts
# them where it is not `num_mtp_layers`.
_ATTENTION = "full_attention"
_COUNTED_BY = "mtp_num_hidden_layers"
OWN_NAMES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_LAYER_TYPES = {_ATTENTION, "sliding_attention"}

Write = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _Described:
    """A target with a configuration that describes its layers for multi-token prediction as transformers expects."""

    def __init__(self, target: Any, config: Any) -> None:
        self._target, self.config = target, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _Buffer:
    """What a layer takes for its cache: `write` stores keys and values `[B, heads, n, size]`, and returns all."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self._write(layer_idx, keys, values)


class MtpLayers:
    """The layers of one target; embedding, output head and rotary embedding are the target's.

    Letters in the shapes: B texts, n tokens each, P positions, D hidden size, V vocabulary.

    Attributes:
        count: number of layers.
        windows: sliding window of each layer in tokens; None for all positions.
    """

    def __init__(self, model: MtpModel) -> None:
        self.model, config = model, model.config
        self.count = len(model.layers)
        types = list(getattr(config, "layer_types", None) or [])[: self.count] or [_ATTENTION] * self.count
        if unknown := sorted({str(each) for each in types} - _LAYER_TYPES):
            raise DraftingRefused(
                f"the layers for multi-token prediction have the type {unknown[0]!r}, whose states of drafts are not "
                "kept by node: expected attention. transformers drafts with them: model.generate(..., use_mtp=True)"
            )
        self._types = types
        self.windows = tuple(config.sliding_window if each != _ATTENTION else None for each in types)
        config._attn_implementation = "sdpa"  # takes any mask

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
        table = self.model.embed_tokens
        return table(tokens.to(table.weight.device)).to(self.device, self.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits `[..., V]` of outputs `[..., D]`."""
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
        """Returns a layer's outputs `[B, n, D]`, normed if the model norms them."""
        model = self.model
        if mask is not None:
            hidden = torch.finfo(embeds.dtype).min
            mask = torch.zeros_like(mask, dtype=embeds.dtype).masked_fill_(~mask, hidden)[:, None]
        rotary, places = model.rotary_emb, None
        if rotary is not None:
            typed = {"layer_type": self._types[layer]} if model.has_per_layer_rope else {}
            cos, sin = rotary(embeds, position_ids=positions, **typed)
            places = cos.to(embeds.device), sin.to(embeds.device)
        outputs: torch.Tensor = model.layers[layer](
            embeds,
            states,
            position_embeddings=places,
            position_ids=positions,
            attention_mask=mask,
            **{CACHE: _Buffer(write)},
        )
        return model.shared_post_norm(outputs) if model.use_shared_post_norm else outputs

    def follow(self, target: Any) -> None:
        """Follows a target that has been moved, or whose embedding or head has been replaced, since they were read."""
        with _following:
            place, model = _last_place(target), self.model
            dtype = target.dtype if target.dtype != self.dtype else None  # else buffers in float32 stay so
            if place != self.device or dtype is not None:
                for part in _own_parts(model):
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
                known[place] = cls(_read(target, hub))
            return known[place]


_loaded: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], MtpLayers]] = weakref.WeakKeyDictionary()
_lock, _following = new_lock(), new_lock()  # calls of several threads follow their target at once


def layers_in(config: Any) -> int:
    """Returns the number of layers for multi-token prediction that a target's configuration tells of."""
    return int(getattr(_described(config).get_text_config(), "num_mtp_layers", None) or 0)


def _described(config: Any) -> Any:
    """Returns a configuration with `num_mtp_layers`, a copy where the target's names it otherwise."""
    text = config.get_text_config()
    if text.model_type not in OWN_NAMES or getattr(text, "num_mtp_layers", None) is not None:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_mtp_layers = getattr(text, _COUNTED_BY, 1) or 0
    text.mtp_layer_types = [_ATTENTION] * text.num_mtp_layers
    if getattr(text, "mlp_layer_types", None) is not None:
        text.mtp_mlp_layer_types = text.mlp_layer_types[-1:] * text.num_mtp_layers
    return config


def described(target: Any) -> Any:
    """Returns a target as transformers' `MtpModel` takes it."""
    return _Described(target, _described(target.config))


def _read(target: Any, hub: Mapping[str, Any]) -> MtpModel:
    name = type(target).__name__
    if not layers_in(target.config):
        raise DraftingRefused(
            f"this {name} has no layers for multi-token prediction (num_mtp_layers in its configuration): train a "
            "drafter with `hsdraft train`, or find one with `hsdraft find`"
        )
    place = getattr(target.config, "name_or_path", "")
    if not place:
        raise DraftingRefused(
            f"this {name} was not loaded from a checkpoint, so its layers for multi-token prediction cannot be read: "
            "load it with from_pretrained"
        )
    if getattr(target.config, "quantization_config", None) is not None:
        raise DraftingRefused(
            f"this {name} is quantised, and its layers for multi-token prediction are read as plain numbers only: load "
            "it without quantization_config, or use another drafter"
        )
    device = _last_place(target)
    if any(weight.is_meta for weight in target.parameters()):
        raise DraftingRefused(
            f"this {name} is offloaded, and its layers for multi-token prediction need weights on a device: load it "
            "without offloading, or use another drafter"
        )
    try:
        model = MtpModel.from_pretrained(_located(target, hub), device_map={"": device})
    except (OSError, RuntimeError, ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise DraftingRefused(
            f"the layers for multi-token prediction cannot be read from {printable(str(place))}: {error}"
        ) from error
    for part in _own_parts(model):  # the others are the target's, which may be in training
        part.eval().requires_grad_(False)
    return model


def _own_parts(model: MtpModel) -> list[nn.Module]:
    return [model.layers, *([model.shared_post_norm] if model.use_shared_post_norm else [])]


def _last_place(target: Any) -> torch.device:
    """The device of the last decoder layer."""
    return next(weight.device for weight in next(reversed(target.get_decoder().layers)).parameters())


def _located(target: Any, hub: Mapping[str, Any]) -> Any:
    """`described`, with the folder in the cache that a target of the Hub was loaded from.

    Raises a FileNotFoundError where that is not there: transformers would fetch the files again, of any revision.
    """
    seen, name = described(target), target.config.name_or_path
    if os.path.isdir(name):
        return seen
    # Recorded before transformers 5.24
    revision = hub.get("revision") or getattr(target.config, "_commit_hash", None)
    found = try_to_load_from_cache(name, CONFIG_NAME, cache_dir=hub.get("cache_dir"), revision=revision)
    if not isinstance(found, str):
        cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
        raise FileNotFoundError(
            f"revision {revision or 'main'} is not in the cache {cache}; give the model's own, as in "
            "MtpDrafter.for_target(model, cache_dir=..., revision=...)"
        )
    seen.config = copy.deepcopy(seen.config)
    seen.config.name_or_path = os.path.dirname(found)
    return seen
