"""A target's own layers for multi-token prediction, run over our buffers.

A *column* is what the layers make of one token of a text. In the column of x_p, layer k reads the embedding of x_p and
the output of layer k - 1 in the column of x_{p-1}, layer 0 the target's hidden state h_{p-1}; its output predicts
x_{p+1}. So these are the pairs that `transformers.modeling_layers.MtpModel` computes, sorted by token
(DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import MtpModel

from ...core.cache_name import CACHE
from ...core.forks import new_lock
from ...core.refusals import DraftingRefused
from .kinds import ATTENTION, CACHED, INDEXED, SLIDING, WINDOWED, Kind, kind_of

_following = new_lock()  # calls of several threads follow their target at once

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
        by_node: whether the states of drafts are kept by node (`run`); else in caches of transformers (`run_cached`).
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
        self.by_node = self.kind.by_node and not {*types} & {*CACHED}
        if unknown := sorted({str(each) for each in types} - {ATTENTION, SLIDING, INDEXED, *CACHED}):
            raise DraftingRefused(
                f"the layers for multi-token prediction have the type {unknown[0]!r}, whose states of drafts are not "
                "kept by node: expected attention. transformers drafts with them: model.generate(..., use_mtp=True)"
            )
        self._types = types
        self.windows = tuple(config.sliding_window if each in WINDOWED else None for each in types)
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
        return next(self.model.layers[0].parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.layers[0].eh_proj.parameters()).dtype

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
        if mask is None and self.num_stored > self.count:  # an index takes no None
            mask = embeds.new_ones(*embeds.shape[:2], 1, dtype=torch.bool)
        return self._run(layer, embeds, states, positions, positions, mask, _Buffer(write, self.count))

    def run_cached(
        self, layer: int, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """As `run`, for texts of one length; keeps in `cache`, of `new_cache`, what the layer reads."""
        count = embeds.shape[1]
        size, first = cache.get_mask_sizes(count, layer)
        slots = torch.arange(max(count, size), device=embeds.device)
        distances = cache.get_query_offset(layer) + slots[:count, None] - first - slots[:size]
        mask = (distances >= 0) & (distances < (self.windows[layer] or 2**31))
        places = (cache.get_seq_length(layer) + slots[:count]).expand(len(embeds), -1)  # groups of keys are of slots
        if self.kind.turns_keys:
            positions = positions[:, -1:] - slots[:size].flip(0)
        return self._run(layer, embeds, states, positions, places, mask.expand(len(embeds), -1, -1), cache)

    def new_cache(self) -> Any:
        """Returns an empty cache for `run_cached`."""
        from transformers.cache_utils import MtpCache

        return MtpCache(config=self.model.config)

    def _run(
        self,
        layer: int,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor:
        model, parts = self.model, self.model.layers[layer]
        if self.kind.masks_padding:
            mask = embeds.new_ones(embeds.shape[:2], dtype=torch.bool)
        elif mask is not None:
            hidden = torch.finfo(embeds.dtype).min
            mask = torch.zeros_like(mask, dtype=embeds.dtype).masked_fill_(~mask, hidden)[:, None]
        rotary, turns = model.rotary_emb, None
        if rotary is not None:
            typed = {"layer_type": self._types[layer]} if model.has_per_layer_rope else {}
            at = positions.expand(3, -1, -1) if self._has_axes else positions  # text has the same position on all axes
            cos, sin = rotary(embeds, position_ids=at, **typed)
            turns = cos.to(embeds.device), sin.to(embeds.device)
        pair = [parts.enorm(embeds), parts.hnorm(states)]
        if getattr(model.config, "mtp_hidden_states_first", False):
            pair.reverse()
        outputs = parts.mtp_block(
            parts.eh_proj(torch.cat(pair, dim=-1)),
            position_embeddings=turns,
            position_ids=places,
            attention_mask=mask,
            **{CACHE: cache},
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
            place, model = last_place(target), self.model
            # Buffers in float32 stay so if it is the same; fp8 is that of quantised weights.
            dtype = target.dtype if target.dtype != self.dtype and target.dtype.itemsize > 1 else None
            if place != self.device or dtype is not None:
                for part in self.own_parts():
                    part.to(device=place, dtype=dtype)
            if model.embed_tokens is not target.get_input_embeddings() or model.shared_head is not target.lm_head:
                tie(model, target)

    def own_parts(self) -> list[nn.Module]:
        """The parts that are not the target's."""
        shared = [self.model.shared_post_norm] if self.model.use_shared_post_norm else []
        return [self.model.layers, *shared, *(each for each in (self.heads, self.table) if each is not None)]


def held_at(depth: int, used: int, deepest: int) -> range:
    """Returns the layers in the columns of nodes of a depth, of `used` layers; the first one predicts their children.

    Nodes at depth `deepest` need none.
    """
    return range(depth, min(used, deepest)) if depth < used else range(depth % used, depth % used + 1)


def tie(model: MtpModel, target: Any) -> None:
    """Takes embedding, output head and rotary embedding of a target.

    A norm that is part of the embedding (Inkling's) stays, as in vLLM; transformers leaves it out.
    """
    model.tie_with_main_model(target)
    model.embed_tokens = target.get_input_embeddings()


def last_place(target: Any) -> torch.device:
    """The device of the last decoder layer."""
    return next(weight.device for weight in next(reversed(target.get_decoder().layers)).parameters())
