"""Limits of a target that are known without trying it: whether drafts can be verified, as trees or not, and how far."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.utils import GenerationMixin

from ..core.refusals import DraftingRefused
from .cache_slots import cache_layers, layer_class, recurrent_layers, text_cache
from .module_hooks import experience_of
from .static_cache import why_not_static

# Number of tokens up to which a text is tried only once, unless the configuration names a length - by hand.
SURE_LENGTH = 256

MASKED_ATTENTION = ("sdpa", "eager", "flex_attention")  # implementations that take a mask of any form
_TREE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"}

# Fields with the number of keys that a query selects by score once there are more. Scores may be equal (a ReLU makes
# many of them zero), and which equal ones are selected depends on the number of cached keys, drafts included.
_CHOSEN_KEYS = ("index_topk", "keep_window_size")

# Names of fields that may hold a length from which a target reads differently, and names that only look like it.
_LENGTH_NAME = re.compile(r"window|chunk|top_?k|block|local|stride|compress|keep|sink|pool|floor")
_NO_LENGTH_NAME = re.compile(r"expert|moe|layer|group|pattern|vision|image|audio|video|feed_forward|_ids?$")


@dataclass(frozen=True)
class Limit:
    """A position up to which a target reads every token alike."""

    last: int  # the last such position
    ever: bool  # whether all drafts beyond it are misread; otherwise only drafts that cross it are
    reason: str


GRADIENTS = (
    "gradients are on and reach the target's outputs, and drafting writes into the cache that a backward pass reads; "
    "decode inside torch.no_grad() to draft"
)


def text_config(target: Any) -> Any:
    """The configuration of the part of a target that decodes text."""
    return target.config.get_text_config(decoder=True)


def decoder_layers(config: Any) -> int:
    """Number of decoder layers in a text configuration; T5 has a separate field for the encoder's."""
    layers = getattr(config, "num_decoder_layers", None)
    return layers if isinstance(layers, int) and layers else config.num_hidden_layers


def why_refused(target: Any, cache: Any) -> str:
    """Why no draft can be verified by this target, as far as model and cache tell; empty if one may."""
    if type(target)._sample is not GenerationMixin._sample:
        return "it decodes in its own way, which drafts do not follow"
    if type(cache) is StaticCache:
        return why_not_static(cache)
    if not isinstance(cache, DynamicCache | EncoderDecoderCache):
        what = "there is no cache" if cache is None else f"its cache is a {type(cache).__name__}"
        return f"{what}; only a DynamicCache or a StaticCache can give back rejected tokens"
    holder = text_cache(cache)
    if isinstance(holder, StaticCache):
        return "an encoder-decoder's static cache cannot be put back to the last accepted token"
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


def refusal(target: Any, reason: str) -> DraftingRefused:
    return DraftingRefused(f"{type(target).__name__} cannot be drafted for: {reason}")


def check_cache(target: Any, cache: Any) -> None:
    """Raises a DraftingRefused with the reason if no draft can be verified with this cache."""
    if cache is None:
        experience_of(target).cacheless = True
    if reason := why_refused(target, cache):
        raise refusal(target, f"{reason}.")


def check_mask(target: Any, mask: Any, slots: int) -> None:
    """Raises a DraftingRefused if the caller's mask `[B, n]` has too few columns, or hides later ones.

    Column i belongs to slot i. Columns beyond the prompts are for the tokens to come.
    """
    if mask is None or (mask.shape[1] >= slots and bool(mask[:, slots:].all())):
        return
    raise refusal(
        target,
        f"its attention mask has {mask.shape[1]} columns, and the cache holds {slots} slots with the prompts; expected "
        "one column for each slot, and none that hides tokens to come.",
    )


def gradients_flow(target: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether a backward pass through a call could reach parameters of the target, or inputs."""
    given = (value for value in tree_leaves(dict(model_kwargs)) if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(each.requires_grad for each in (*target.parameters(), *given))


def check_inputs(target: Any) -> None:
    """Raises a DraftingRefused if a forward's inputs are prepared by anything but the target's class.

    PEFT's prompt-learning methods replace that method on the model during `generate`. They put virtual tokens before
    the text, which a drafter does not see, and after the prompt they pass only the last token, so no draft can be
    verified. Encoder-decoders are not affected: there PEFT changes nothing after the prompt.
    """
    found = vars(target).get("prepare_inputs_for_generation")
    own = type(target).prepare_inputs_for_generation
    # After a call PEFT leaves the class's method as an instance attribute.
    if found is None or getattr(found, "__func__", found) is own or target.config.is_encoder_decoder:
        return
    whose = getattr(found, "__qualname__", type(found).__name__)
    raise refusal(
        target,
        f"its prepare_inputs_for_generation was replaced by {whose}. PEFT does so for prompt tuning, p-tuning and "
        "prefix tuning: their virtual tokens stand before the text, where a draft cannot be verified. Use an adapter "
        f"of the weights such as LoRA, or {DraftingRefused.PLAINLY}; `with model.disable_adapter():` drafts for the "
        "model without the virtual tokens.",
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
    """Whether the `crop` of a cache or layer was written for its `update`.

    A class that overrides `update` and inherits `crop` may keep more or less than `crop` expects, whatever
    `is_croppable` says. The same holds for an object whose `update` was replaced.
    """
    order = [vars(cache), *map(vars, layer_class(cache).__mro__)]
    crop, update = (
        next((place for place, names in enumerate(order) if name in names), None) for name in ("crop", "update")
    )
    return crop is None or update is None or crop <= update


def furthest_position(target: Any) -> int:
    """Number of the target's positions; unlimited if its configuration names no limit, or only one to scale from."""
    window = getattr(text_config(target), "max_position_embeddings", None)
    if any("dynamic" in str(part.get("rope_type")) for part in _rotary_parameters(text_config(target))):
        return sys.maxsize
    return window if isinstance(window, int) and window > 0 else sys.maxsize


def furthest_read(target: Any, position: int) -> int:
    """The furthest position that a forward which decides the token at `position` may reach.

    Never beyond the target's last position, and never across a `Limit`: some rotary embeddings (`dynamic`, `longrope`)
    change the frequencies of the whole forward once it crosses a certain position.
    """
    furthest = furthest_position(target) - 1
    for limit in _limits(target):
        if position <= limit.last:
            furthest = min(furthest, limit.last)
        elif limit.ever or position == limit.last + 1:
            # The step across is read as in plain decoding: some models recompute their cache there.
            furthest = position
    return furthest


def why_drafts_end(target: Any, position: int) -> str:
    """Beyond which position nothing is drafted, and why, if that is before `position`; otherwise empty."""
    for limit in _limits(target):
        if limit.ever and position > limit.last:
            return f"nothing is drafted beyond position {limit.last}: {limit.reason}"
    return ""


def why_in_step(target: Any, length: int, slots: range) -> str:
    """Why the rows of a batch must be read in step, in the same slots as in plain decoding; empty if they need not.

    Args:
        length: maximum text length of the call.
        slots: of the cache that the call may still fill.
    """
    for limit in _limits(target):
        if limit.last < length - 1:
            return f"{limit.reason}, which follows the longest row of a batch"
    if len(slots) > slots_read_alike(target, slots.start):
        return "its queries are scaled by cache slot, which all rows of a batch share"
    return ""


def slots_read_alike(target: Any, slot: int) -> int:
    """Number of cache slots from `slot` on, inclusive, in which a target reads a token alike.

    Llama 4 scales the queries of some layers by slot, not by position, in steps of `floor_scale`. In a tree several
    slots share a position, so a tree must lie within one step. In a chain each slot is its position.
    """
    config = text_config(target)
    step = getattr(config, "floor_scale", None)
    if not getattr(config, "attn_temperature_tuning", False) or not isinstance(step, int) or step < 1:
        return sys.maxsize
    return step - (slot + 1) % step


def known_until(target: Any, length: int, doubling: bool = True) -> int:
    """Text length up to which a finding at `length` tokens is assumed to hold.

    That is twice the length or a few hundred tokens, unless not `doubling`, and never beyond a length that the
    configuration names.
    """
    named = [window for window in windows(text_config(target)) if window >= length]
    return min([*named, max(SURE_LENGTH, 2 * length) if doubling else sys.maxsize])


def windows(config: Any) -> list[int]:
    """All numbers of a text configuration whose names suggest a length from which the model reads differently."""
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
