"""Estimates whether a hierarchy would pay on a device that is not available, from sizes and assumed acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..estimate.decoding_estimate import Device
from ..estimate.training_estimate import target_parts
from .hierarchy import Acceptance, Curve, Drafting, Levels, best_cascade, singles

NGRAMS, MIDDLE, TARGET = "n-grams", "middle", "target"
SAME_TOKENS = (
    "the middle model has to have the target's tokenizer; a vocabulary of equal size does not say so, and is all that "
    "is compared here"
)
_PADDING = 512  # tokens; tables are padded to multiples of powers of two
_LOOK_UP = 1e-4  # seconds of a draft by n-grams


def forward_of(config: Any, device: Device, length: int, bytes_per_weight: int = 2) -> Curve:
    """Returns the seconds of a model's forwards after `length` tokens, bound by memory and then by compute.

    Memory reads are of weights, keys and values, all of `bytes_per_weight`.
    """
    sizes = config.get_text_config()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    weights = target_parts(config)["body"] + sizes.vocab_size * sizes.hidden_size
    text = 2 * sizes.num_hidden_layers * heads * head_dim * length
    reading = (weights + text) * bytes_per_weight / device.bytes_per_second
    token = 2 * weights / device.flops_per_second
    even = max(int(reading / token), 1)  # largest number of tokens whose forward costs as much as one token's
    if even == 1:
        return Curve(((1, max(reading, token)), (2, 2 * token)))
    return Curve(((1, reading), (even, reading), (2 * even, 2 * even * token)))


def check_vocabularies(config: Any, middle: Any) -> None:
    """Raises a ValueError if the middle model's vocabulary differs from the target's by more than padding."""
    sizes = [each.get_text_config().vocab_size for each in (config, middle)]
    if abs(sizes[0] - sizes[1]) > _PADDING:
        raise ValueError(
            f"the middle model has vocab_size={sizes[1]:,}, the target {sizes[0]:,}: expected a model with the "
            "target's tokenizer, whose size differs by padding at most"
        )


def estimated_levels(config: Any, middle: Any, shares: Sequence[float], device: Device, length: int) -> Levels:
    """Returns the levels n-grams, middle model and target after `length` tokens.

    `shares` are of tokens accepted, each after an accepted one: n-grams by the target, n-grams by the middle model, and
    the middle model by the target; a ValueError unless they are three in [0, 1). With 1, drafts would never end.
    """
    if len(shares) != 3 or not all(0.0 <= share < 1.0 for share in shares):
        raise ValueError(
            f"shares={list(shares)} is invalid: expected three numbers of 0 or more and below 1, of n-grams by the "
            "target, of n-grams by the middle model, and of the middle model by the target"
        )
    forwards = {name: forward_of(each, device, length) for name, each in ((MIDDLE, middle), (TARGET, config))}
    pairs = ((NGRAMS, TARGET), (NGRAMS, MIDDLE), (MIDDLE, TARGET))
    acceptances = {pair: Acceptance.even(share) for pair, share in zip(pairs, shares, strict=True)}
    step = forwards[MIDDLE](1)
    first = {NGRAMS: Drafting(Curve(((1, _LOOK_UP),))), MIDDLE: Drafting(Curve(((1, step), (2, 2 * step))))}
    return Levels(first, forwards, acceptances, TARGET, forwards[TARGET](1))


def estimate_cascade(levels: Levels, other: float = 0.0) -> list[str]:
    """Returns whether the best hierarchy pays, the acceptance that it needs, and then the arithmetic.

    `other` is the speed-up of another drafter that a hierarchy must beat too.
    """
    lines = [f"forward of {name} over one token: {1000 * each(1):.4g} ms" for name, each in levels.forwards.items()]
    alone, cascade = singles(levels), best_cascade(levels)
    for plan in [*alone, *([cascade] if cascade else [])]:
        lines += [f"{plan.title}:", *(f"  {line}" for line in plan.lines)]
    best = max(alone[0].speed_up, other)
    if cascade is None:
        return ["no hierarchy: the middle model is not quicker than the target", "", *lines]
    verdict = "pays" if cascade.speed_up > best else "does not pay"
    share = needed_acceptance(levels, MIDDLE, other)
    needed = "no share of the middle model's tokens would be enough"
    if share is not None:
        needed = f"it pays from a share of {share:.2f} of the middle model's tokens on"
    compared = f"{cascade.speed_up:.3f} against {best:.3f} of the best drafter alone"
    return [f"the hierarchy {verdict}: {compared}; {needed}", "", *lines]


def needed_acceptance(levels: Levels, middle: str, other: float = 0.0) -> float | None:
    """Returns the acceptance of a middle model's tokens from which a hierarchy beats every single drafter.

    That is the share of its tokens that the target accepts, each after an accepted one; `None` if no share is enough.
    `other` is the speed-up of a further single drafter.
    """
    low, high = 0.0, 0.999
    if not _wins(levels, middle, high, other):
        return None
    for _ in range(10):
        share = (low + high) / 2
        low, high = (low, share) if _wins(levels, middle, share, other) else (share, high)
    return high


def _wins(levels: Levels, middle: str, share: float, other: float) -> bool:
    known = {**levels.acceptances, (middle, levels.target): Acceptance.even(share)}
    changed = replace(levels, acceptances=known)
    cascade = best_cascade(changed)
    return cascade is not None and cascade.speed_up > max(singles(changed)[0].speed_up, other)
