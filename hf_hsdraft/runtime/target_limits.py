"""What is known of a target without trying: whether drafts can be verified at all, whether as trees, and how far."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)
from transformers.generation.utils import GenerationMixin

from ..core.refusals import DraftingRefused
from ..core.tuning import TUNING
from ..trees.tree_masks import MASKED_ATTENTION
from .cache_slots import cache_layers, layer_class, recurrent_layers, text_cache
from .static_cache import why_not_static
from .text_configs import decoder_layers as decoder_layers
from .text_configs import text_config as text_config

_TREE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"}

# Fields that say how many keys a query chooses by a score once there are more. Scores may be equal (a ReLU makes many
# of them zero), and which of the equal ones are chosen depends on how many keys stand in the cache, drafts included.
_CHOSEN_KEYS = ("index_topk", "keep_window_size")

# Fields that may say from which length on a target reads otherwise, and names that only look like it.
_LENGTH_NAME = re.compile(r"window|chunk|top_?k|block|local|stride|compress|keep|sink|pool|floor")
_NO_LENGTH_NAME = re.compile(r"expert|moe|layer|group|pattern|vision|image|audio|video|feed_forward|_ids?$")


@dataclass(frozen=True)
class Limit:
    """A position up to which a target reads every token alike.

    Attributes:
        last: the last such position.
        ever: whether no draft can be read rightly at any position beyond it; otherwise only a draft that reaches over
            it is misread.
        reason: what changes there.
    """

    last: int
    ever: bool
    reason: str


def why_refused(target: Any, cache: Any) -> str:
    """Why no draft can be verified by this target, as far as model and cache tell; empty if one may."""
    if type(target)._sample is not GenerationMixin._sample:
        return "it decodes in a way of its own, which a draft does not follow"
    if type(cache) is StaticCache:
        return why_not_static(cache)
    if not isinstance(cache, DynamicCache | EncoderDecoderCache):
        what = "there is no cache" if cache is None else f"its cache is a {type(cache).__name__}"
        return f"{what}; only a DynamicCache or a StaticCache can give back rejected tokens"
    holder = text_cache(cache)
    if not cache.is_croppable and type(holder) is not DynamicCache:
        return f"its cache, a {type(cache).__name__}, cannot be put back to the last accepted token"
    if cache_layers(cache) and not any(isinstance(layer, CacheLayerMixin) for layer in cache_layers(cache)):
        return "its cache has linear-attention layers only, and does not tell how many tokens it holds"
    if not _crops_what_it_keeps(holder):
        return (
            f"its cache, a {type(holder).__name__}, has its own update and no crop beside it: what it drops for a "
            "draft could not be brought back (if it drops nothing, let the class define crop too)"
        )
    unable = sorted({type(layer).__name__ for layer in cache_layers(cache) if not _crops_what_it_keeps(layer)})
    if unable:
        return f"its cache layers ({', '.join(unable)}) cannot be put back to the last accepted token"
    return ""


def check_cache(target: Any, cache: Any) -> None:
    """Raises a DraftingRefused that says why no draft can be verified with this cache, if none can."""
    reason = why_refused(target, cache)
    if reason:
        raise DraftingRefused(f"{type(target).__name__} cannot be drafted for: {reason}.")


def check_mask(target: Any, mask: Any, slots: int) -> None:
    """Raises a DraftingRefused if the caller's mask `[B, n]` says nothing of some cache slot, or hides later ones.

    Column i belongs to slot i. A mask that reaches beyond the prompts is about the tokens to come.
    """
    if mask is None or (mask.shape[1] >= slots and bool(mask[:, slots:].all())):
        return
    raise DraftingRefused(
        f"{type(target).__name__} cannot be drafted for: its attention mask has {mask.shape[1]} columns, and the cache "
        f"holds {slots} slots with the prompts; expected one column for each slot, and none that hides tokens to come."
    )


def check_inputs(target: Any) -> None:
    """Raises a DraftingRefused if something else than the target's own class prepares the inputs of its forwards.

    PEFT's prompt-learning methods set such a method on the model during their `generate`. It puts virtual tokens
    before the text, which a drafter does not see, and after the prompt it passes on the last token only, so that no
    draft can be verified. An encoder-decoder is not affected: there PEFT changes nothing after the prompt.
    """
    found = vars(target).get("prepare_inputs_for_generation")
    own = type(target).prepare_inputs_for_generation
    # PEFT leaves the model's own method on it after a call.
    if found is None or getattr(found, "__func__", found) is own or target.config.is_encoder_decoder:
        return
    whose = getattr(found, "__qualname__", type(found).__name__)
    raise DraftingRefused(
        f"{type(target).__name__} cannot be drafted for: its prepare_inputs_for_generation was replaced by {whose}. "
        "PEFT does so for prompt tuning, p-tuning and prefix tuning: their virtual tokens stand before the text, where "
        f"a draft cannot be verified. Use an adapter of the weights such as LoRA, or {DraftingRefused.PLAINLY}; "
        "`with model.disable_adapter():` drafts for the model without the virtual tokens."
    )


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
    kinds = sorted({layer_class(layer).__name__ for layer in layers} - _TREE_LAYERS)
    if kinds:
        return f"the branches of a tree cannot be told apart in its cache layers ({', '.join(kinds)})"
    holder = type(text_cache(cache))
    if holder.update is not Cache.update:
        return f"the branches of a tree cannot be told apart in its cache, a {holder.__name__} with its own update"
    config = text_config(target)
    if getattr(config, "alibi", False):
        return "its attention is biased by the distance of cache slots, which a tree's nodes do not keep"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "some of its layers attend locally by cache slot, which a tree's nodes do not follow"
    if "position_ids" not in inspect.signature(target.forward).parameters:
        return "its positions follow from cache slots (no position_ids), and siblings in a tree share a position"
    return ""


def _crops_what_it_keeps(cache: Any) -> bool:
    """Whether the `crop` of a cache or of one of its layers was written for what its `update` keeps.

    A class that replaces `update` and inherits `crop` keeps more than `crop` knows of, or less, whatever `is_croppable`
    says. So does an object whose `update` was replaced.
    """
    order = [vars(cache), *map(vars, layer_class(cache).__mro__)]
    crop, update = (
        next((place for place, names in enumerate(order) if name in names), None) for name in ("crop", "update")
    )
    return crop is None or update is None or crop <= update


def furthest_position(target: Any) -> int:
    """Positions the target has; unlimited where its configuration names no limit, or only one to scale from."""
    window = getattr(text_config(target), "max_position_embeddings", None)
    if any("dynamic" in str(part.get("rope_type")) for part in _rotary_parameters(text_config(target))):
        return sys.maxsize
    return window if isinstance(window, int) and window > 0 else sys.maxsize


def furthest_read(target: Any, position: int) -> int:
    """The furthest position that a forward may reach which decides about the token at `position`.

    Never beyond the target's last one, and never over a `Limit`: some rotary embeddings (`dynamic`, `longrope`) take
    other frequencies for the whole forward once it reaches beyond a certain position.
    """
    furthest = furthest_position(target) - 1
    for limit in _limits(target):
        if position <= limit.last:
            furthest = min(furthest, limit.last)
        elif limit.ever or position == limit.last + 1:
            # The step over it is read as plain decoding reads it: some models compute their cache anew there.
            furthest = position
    return furthest


def why_drafts_end(target: Any, position: int) -> str:
    """From where on nothing is drafted, and why, if that is before `position`; an empty string otherwise."""
    for limit in _limits(target):
        if limit.ever and position > limit.last:
            return f"nothing is drafted beyond position {limit.last}: {limit.reason}"
    return ""


def why_in_step(target: Any, length: int, slots: range) -> str:
    """Why the rows of a batch have to be read in step, so that they stand in the cache as in plain decoding.

    Args:
        length: of the longest text that the call may make.
        slots: of the cache, that the call may fill from here on.

    Returns:
        an empty string if every row may go at its own pace.
    """
    for limit in _limits(target):
        if limit.last < length - 1:
            return f"{limit.reason}, which follows the longest row of a batch"
    if len(slots) > slots_read_alike(target, slots.start):
        return "its queries are scaled by cache slot, which all rows of a batch share"
    return ""


def slots_read_alike(target: Any, slot: int) -> int:
    """Slots of the cache from `slot` on, it included, in which a target reads a token alike.

    Llama 4 scales the queries of some layers by the slot, in steps of `floor_scale`, not by the position. In a tree
    several slots share a position, so a tree has to lie within one step. In a chain each slot is its position.
    """
    config = text_config(target)
    step = getattr(config, "floor_scale", None)
    if not getattr(config, "attn_temperature_tuning", False) or not isinstance(step, int) or step < 1:
        return sys.maxsize
    return step - (slot + 1) % step


def known_until(target: Any, length: int, doubling: bool = True) -> int:
    """The length of text up to which what a target was found to do with a text of `length` tokens is taken to hold.

    To twice the length or a few hundred tokens, but never beyond a length that the configuration names.

    Args:
        doubling: count with lengths that no configuration names.
    """
    named = [window for window in windows(text_config(target)) if window >= length]
    return min([*named, max(TUNING.sure_length, 2 * length) if doubling else sys.maxsize])


def windows(config: Any) -> list[int]:
    """All numbers of a text configuration that may be lengths from which on it reads otherwise, by their names."""
    found: list[Any] = []
    for name, value in vars(config).items():
        if _LENGTH_NAME.search(name) and not _NO_LENGTH_NAME.search(name):
            several = value.values() if isinstance(value, dict) else value
            found += several if isinstance(several, Iterable) else [value]
    return [each for each in found if type(each) is int and each > 0]


def _limits(target: Any) -> Iterator[Limit]:
    config = text_config(target)
    yield from rotary_limits(config)
    for name in _CHOSEN_KEYS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 0:
            reason = f"it attends to {count} keys ({name}) that it chooses by scores, of which some may be equal"
            yield Limit(count - 1, True, reason)


def rotary_limits(config: Any) -> Iterator[Limit]:
    """Returns the positions at which rotary frequencies change."""
    for parameters in _rotary_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if kind == "longrope":
            last = parameters["original_max_position_embeddings"] - 1
            yield Limit(last, False, "its rotary frequencies change with the length")
        elif "dynamic" in kind:
            last = config.max_position_embeddings - 1
            yield Limit(last, True, "its rotary frequencies change with the length")


def _rotary_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]
