"""A target's own layers for multi-token prediction: loaded from its checkpoint, and run over our buffers.

A *column* is what the layers make of one token of a text. In the column of x_p, layer k reads the embedding of x_p and
the output of layer k - 1 in the column of x_{p-1}, layer 0 the target's hidden state h_{p-1}; its output predicts
x_{p+1}. So these are the pairs that `transformers.modeling_layers.MtpModel` computes, sorted by token
(DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from ...core.cache_name import CACHE
from ...core.checks import printable
from ...core.refusals import DraftingRefused

# Targets whose layers `mtp.layers.*` transformers leaves out though its `MtpModel` fits them, and the field that counts
# them where it is not `num_mtp_layers`.
_ATTENTION = "full_attention"
_COUNTED_BY = "mtp_num_hidden_layers"
_OWN_NAMES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
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
            places = rotary(embeds, position_ids=positions, **typed)
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
        """Moves the layers to the device and dtype of a target that has been moved since they were read."""
        weight = next(next(reversed(target.get_decoder().layers)).parameters())
        if weight.device.type != "meta" and (weight.device, weight.dtype) != (self.device, self.dtype):
            self.model.layers.to(weight.device, weight.dtype)

    @classmethod
    def of(cls, target: Any) -> MtpLayers:
        """Returns a target's layers, read from the checkpoint it was loaded from, once for each target.

        Raises a DraftingRefused if it has none, or layers that cannot draft here.
        """
        with _lock:
            if target not in _loaded:
                _loaded[target] = cls(_read(target))
            return _loaded[target]


_loaded: weakref.WeakKeyDictionary[Any, MtpLayers] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def layers_in(config: Any) -> int:
    """Returns the number of layers for multi-token prediction that a target's configuration tells of."""
    return int(getattr(_described(config).get_text_config(), "num_mtp_layers", None) or 0)


def _described(config: Any) -> Any:
    """Returns a configuration with `num_mtp_layers`, a copy where the target's names it otherwise."""
    text = config.get_text_config()
    if text.model_type not in _OWN_NAMES or getattr(text, "num_mtp_layers", None) is not None:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_mtp_layers = getattr(text, _COUNTED_BY, 1)
    text.mtp_layer_types = [_ATTENTION] * text.num_mtp_layers
    if getattr(text, "mlp_layer_types", None) is not None:
        text.mtp_mlp_layer_types = text.mlp_layer_types[-1:] * text.num_mtp_layers
    return config


def described(target: Any) -> Any:
    """Returns a target as transformers' `MtpModel` takes it."""
    return _Described(target, _described(target.config))


def _read(target: Any) -> MtpModel:
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
    layer = next(reversed(target.get_decoder().layers))
    device = next(weight.device for weight in layer.parameters())
    try:
        return MtpModel.from_pretrained(described(target), device_map={"": device}).eval().requires_grad_(False)
    except (OSError, RuntimeError, ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise DraftingRefused(
            f"the layers for multi-token prediction cannot be read from {printable(str(place))}: {error}"
        ) from error
