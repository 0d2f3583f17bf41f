"""What is known of a target without trying: whether drafts can be verified at all, whether as trees, and how far."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache, StaticLayer
from transformers.generation.utils import GenerationMixin

from .static_cache import why_not_static
from .tree_masks import MASKED_ATTENTION

_TREE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"}


def text_config(target: Any) -> Any:
    """The configuration of the part of a target that decodes text."""
    return target.config.get_text_config(decoder=True)


def why_refused(target: Any, cache: Any) -> str:
    """Why no draft can be verified by this target, as far as model and cache tell; empty if one may."""
    if type(target)._sample is not GenerationMixin._sample:
        return "it decodes in a way of its own, which a draft does not follow"
    if type(cache) is StaticCache:
        return why_not_static(cache)
    if not isinstance(cache, DynamicCache | EncoderDecoderCache):
        what = "there is no cache" if cache is None else f"its cache is a {type(cache).__name__}"
        return f"{what}; only a DynamicCache or a StaticCache can give back rejected tokens"
    holder = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not cache.is_croppable and type(holder) is not DynamicCache:
        return f"its cache, a {type(cache).__name__}, cannot be put back to the last accepted token"
    return ""


def why_no_trees(target: Any, cache: Any) -> str:
    """Why this target cannot verify a tree, as far as model and cache tell; empty if it may."""
    attention = text_config(target)._attn_implementation
    if attention not in MASKED_ATTENTION:
        return (
            f"its attention implementation {attention!r} does not take a tree's mask; trees need one of "
            f"{', '.join(MASKED_ATTENTION)}"
        )
    layers = [layer for layer in cache_layers(cache) if getattr(layer, "keys", None) is not None]
    recurrent = sorted({type(layer).__name__ for layer in recurrent_layers(cache)})
    if recurrent:
        return f"the branches of a tree cannot share the states of its recurrent layers ({', '.join(recurrent)})"
    kinds = sorted({type(layer).__name__ for layer in layers} - _TREE_LAYERS)
    if kinds:
        return f"the branches of a tree cannot be told apart in its cache layers ({', '.join(kinds)})"
    config = text_config(target)
    if getattr(config, "alibi", False):
        return "its attention is biased by the distance of cache slots, which a tree's nodes do not keep"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "some of its layers attend locally by cache slot, which a tree's nodes do not follow"
    if "position_ids" not in inspect.signature(target.forward).parameters:
        return "its positions follow from cache slots (no position_ids), and siblings in a tree share a position"
    return ""


def cache_layers(cache: Any) -> list[Any]:
    """The layers of the cache that hold the decoded text."""
    return (cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache).layers


def recurrent_layers(cache: Any) -> list[Any]:
    """The layers that cannot drop their last tokens: a copy of them from before has to take their place."""
    return [layer for layer in cache_layers(cache) if not layer.is_croppable and type(layer) is not StaticLayer]


def furthest_position(target: Any) -> int:
    """Positions the target has; unlimited where its configuration names no limit, or only one to scale from."""
    window = getattr(text_config(target), "max_position_embeddings", None)
    if any("dynamic" in str(part.get("rope_type")) for part in _rotary_parameters(text_config(target))):
        return sys.maxsize
    return window if isinstance(window, int) and window > 0 else sys.maxsize


def furthest_read(target: Any, position: int) -> int:
    """The furthest position that a forward may reach which decides about the token at `position`.

    Never beyond the target's last one. Some rotary embeddings (`dynamic`, `longrope`) take other frequencies for the
    whole forward once it reaches beyond a certain position; no draft may lead it there before the text does.
    """
    furthest = furthest_position(target) - 1
    for last, ever in _changes_of_frequency(target):
        if position <= last:
            furthest = min(furthest, last)
        elif ever or position == last + 1:
            # The step over it is read as plain decoding reads it: some models compute their cache anew there.
            furthest = position
    return furthest


def frequencies_change(target: Any, length: int) -> bool:
    """Whether rotary frequencies change within texts of up to `length` tokens."""
    return any(last < length - 1 for last, _ in _changes_of_frequency(target))


def _changes_of_frequency(target: Any) -> list[tuple[int, bool]]:
    """The last positions before rotary frequencies change, and whether they do at every position from there on."""
    config = text_config(target)
    changes = []
    for parameters in _rotary_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if kind == "longrope":
            changes.append((parameters["original_max_position_embeddings"] - 1, False))
        elif "dynamic" in kind:
            changes.append((config.max_position_embeddings - 1, True))
    return changes


def _rotary_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]
