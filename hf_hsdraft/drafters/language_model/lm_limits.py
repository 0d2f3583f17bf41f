"""A language model's abilities as a drafter, by its class, configuration and cache."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from ...core.cache_name import takes_cache
from ...runtime.cache_slots import CacheSlots, cache_layers
from ...runtime.target_limits import furthest_position, text_config, why_no_trees, why_refused
from ...runtime.tree_reading import AttentionKind, attention_kinds


def kind_of(model: Any) -> tuple[Any, ...]:
    """Returns what the time of a model's forwards depends on: type, size, dtype and device."""
    weights = sum(weight.numel() for weight in model.parameters())
    return text_config(model).model_type, weights, model.dtype, model.device


def empty_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=text_config(model))


def why_it_cannot_draft(model: Any) -> str:
    """Returns why a model cannot draft at all; "" if it can."""
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        return f"{name} has no output layer: expected a causal language model"
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder: a drafter has only the text to read"
    cache = empty_cache(model)
    if getattr(model, "_is_stateful", False) or CacheSlots(cache).recurrent:
        return f"{name} has recurrent layers: they cannot take back the tokens that the target rejects"
    if not takes_cache(model):
        return f"{name} keeps no keys and values: it would read the whole text for every drafted token"
    reason = why_refused(model, cache)
    return f"{name}: {reason}" if reason else ""


def kinds_for_trees(model: Any) -> list[AttentionKind]:
    """Returns the attention types that need separate masks; raises a ValueError if the model cannot read trees."""
    cache = empty_cache(model)
    reason = why_no_trees(model, cache)
    if reason:
        raise ValueError(reason)
    return attention_kinds(text_config(model), [True] * len(cache_layers(cache)))


def most_tokens(model: Any) -> int:
    """Returns the number of positions that a model has."""
    return furthest_position(model)
