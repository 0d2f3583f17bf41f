"""Drafts in a `StaticCache`: tensors of fixed size and place, whose count is reset to the end of the accepted nodes."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DummyLayer, StaticCache, StaticLayer

from ..core.cache_name import CACHE, given_cache
from ..core.refusals import DraftingRefused


def why_not_static(cache: StaticCache) -> str:
    """Why no draft can be read into a static cache; empty if one can."""
    if cache.offloading:
        return "its static cache is offloaded, and moves its tensors while a draft is read"
    others = sorted({type(layer).__name__ for layer in cache.layers} - {StaticLayer.__name__, DummyLayer.__name__})
    if others:
        return f"layers of its static cache ({', '.join(others)}) overwrite what is needed after a rejection"
    return ""


class StaticSlots:
    """The slots of a static cache with a prompt, `size` in every layer, of which the first `filled` are in use.

    The layers count on the device, where reading the count would synchronise. So it is mirrored here, and every reader
    of the cache must update it.
    """

    def __init__(self, cache: StaticCache) -> None:
        self._layers = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
        self.size = int(self._layers[0].max_cache_len)
        self.filled = int(cache.get_seq_length())

    @property
    def left(self) -> int:
        return self.size - self.filled

    def fill(self, count: int) -> None:
        """Sets the number of filled slots in all layers, also where a forward stopped between two of them."""
        self.filled = count
        for layer in self._layers:
            layer.cumulative_length.fill_(count)

    @property
    def states(self) -> list[torch.Tensor]:
        """Keys and values of all layers, each `[B, heads, size, head_dim]`."""
        return [states for layer in self._layers for states in (layer.keys, layer.values)]


def with_draft_room(
    target: Any, model_kwargs: dict[str, Any], generation_config: Any, input_ids: torch.Tensor, columns: int
) -> dict[str, Any]:
    """Returns `model_kwargs` whose static cache, if any, fits a draft of `columns` nodes after the longest text.

    A cache of the caller is kept. Where it becomes too short, a single text stops drafting, and a batch raises a
    DraftingRefused.
    """
    cache = given_cache(model_kwargs)
    if not isinstance(cache, StaticCache) or why_not_static(cache):
        return model_kwargs
    cached, new_tokens = int(cache.get_seq_length()), generation_config.max_length - input_ids.shape[1]
    prompts = slots_of_prompts(target, input_ids, generation_config, model_kwargs, cached)
    needed = prompts + new_tokens - 1 + columns
    if cache.get_max_length() >= needed:
        return model_kwargs
    if getattr(cache, "_is_user_defined", False):
        if len(input_ids) > 1:
            raise DraftingRefused(
                f"the static cache has max_cache_len={cache.get_max_length()}; with a drafter this batch needs "
                f"{needed}, {columns} of them for a draft. Make it longer, or use cache_implementation='static'."
            )
        return model_kwargs
    roomy = target._prepare_static_cache(  # as `generate` does; it caches the length, so later calls keep the shape
        cache_implementation=generation_config.cache_implementation,
        batch_size=len(input_ids),
        max_cache_len=needed + -needed % 8,  # attention kernels want rows of a mask aligned
        prefill_chunk_size=generation_config.prefill_chunk_size,
        model_kwargs=model_kwargs,
    )
    return {**model_kwargs, CACHE: roomy}


def slots_of_prompts(
    target: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], cached: int
) -> int:
    """Number of slots filled once `generate()` has read the prompts `[B, length]`; `cached` are filled before.

    `generate()` takes inputs as long as the mask, or embeddings, for the whole texts and skips what the cache holds.
    Otherwise the inputs follow what the cache holds.
    """
    decoder = target.config.is_encoder_decoder
    embeds = None if decoder else model_kwargs.get("inputs_embeds")
    mask = model_kwargs.get("decoder_attention_mask" if decoder else "attention_mask")
    known = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    length = (input_ids if embeds is None else embeds).shape[1]
    whole = embeds is not None or known == length
    return cached + len(range(length)[cached - length if whole else 0 :])
