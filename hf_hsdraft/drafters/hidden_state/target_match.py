"""Checks by behaviour, not by name, whether the target is the one that a drafter was made for.

A mismatch cannot change the output, only the acceptance. A drafter carries a short text that its target wrote greedily,
and the number of tokens for which its first choice was the target's. One forward counts this for another target
(trained further, quantised, with other tokens). It takes as long as several rounds, so it runs only after drafts did
worse than the record predicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import printable
from ...core.kept import kept_with
from ...runtime.prompt_inputs import inputs_of
from ...runtime.target_limits import furthest_position, rotary_limits, text_config
from ..base.registry import tokenizer_hash
from .network import HSDraftNetwork

# Part of the recorded right guesses that is enough - by hand: another dtype changes a few of a hundred choices.
FIT_ENOUGH = 0.85
FIT_SLACK = 2  # number of guesses that may be missing besides - by hand
# Number of drafts until guesses are judged, and until they are judged no more - by hand.
FIT_JUDGED = 16
FIT_TRUSTED = 96

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TargetMatch:
    """Choices of a target and a drafter on a text."""

    tokens: int  # number of tokens compared
    agreed: int  # tokens that are this target's greedy choice
    drafted: int  # tokens for which the drafter's first choice, one token ahead, is this target's greedy choice


def can_measure(target: Any, length: int) -> bool:
    """Whether a forward over `length` tokens leaves the target unchanged; longer ones may switch its rope."""
    return (
        not target.config.is_encoder_decoder
        and length <= furthest_position(target)
        and all(limit.last >= length - 1 for limit in rotary_limits(text_config(target)))
    )


@torch.no_grad()
def measure_match(target: Any, drafter: HSDraftNetwork, input_ids: Sequence[int], start: int) -> TargetMatch:
    """Reads a text once and compares the choices of target and drafter from position `start`, at least 2."""
    inputs = inputs_of(target, input_ids)
    ids, places = inputs["input_ids"], torch.arange(len(input_ids), device=drafter.device)
    taps = list(drafter.config.target_tap_layers)
    output = target(**inputs, output_hidden_states=taps, use_cache=False)
    choices = output.logits[0, start - 1 : -1].argmax(dim=-1).cpu()
    # The target's layers may be on several devices.
    states = [output.hidden_states[layer][0, :-1].to(drafter.device, drafter.dtype) for layer in taps]
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    hidden = drafter(
        torch.cat(states, dim=-1),
        weights.embed(ids[0, 1:]),
        places[:-1],
        starts=places[start - 2 : -2],
        num_draft_steps=1,
    ).hidden_states[0]
    guesses = weights.vocab_ids[drafter.logits(hidden, weights).argmax(dim=-1)].cpu()
    return TargetMatch(
        tokens=len(choices),
        agreed=int((choices == ids[0, start:].cpu()).sum()),
        drafted=int((guesses == choices).sum()),
    )


def explain_mismatch(target: Any, drafter: HSDraftNetwork, tokenizer: Any = None) -> str:
    """Why a drafter may draft little for a target, as measured; empty if it does as well as for its own."""
    config, reference = drafter.config, drafter.config.target_reference
    made_for = f"this drafter was made for {printable(config.target_name) or 'another target'}"
    other_tokens = has_other_tokens(drafter, tokenizer)
    if reference is None or not can_measure(target, len(reference["input_ids"])):
        unknown = "what that costs could not be measured"
        return f"{made_for}, whose tokenizer has other tokens than this one; {unknown}" if other_tokens else ""
    match = measure_match(target, drafter, reference["input_ids"], reference["start"])
    if match.drafted + FIT_SLACK >= FIT_ENOUGH * reference["drafted"]:
        return ""  # whatever the target's name
    cause = "its tokenizer has other tokens" if other_tokens else "it was trained further, or is another model"
    return (
        f"{made_for}, and fits this target less ({cause}): in a text of {match.tokens} tokens its first guess is what "
        f"this target would say {match.drafted} times, of its own target {reference['drafted']} times (this one would "
        f"write {match.tokens - match.agreed} of the tokens otherwise). The text stays this target's own, but less of "
        "it is drafted; `hsdraft train --init-from` adapts a drafter"
    )


@dataclass
class _Pair:
    """What is known of a target and a drafter: drafts, and those whose first guess was right."""

    drafts: int = 0
    right: int = 0
    warned: bool = False


def _pair(target: Any, drafter: HSDraftNetwork) -> _Pair:
    pairs: weakref.WeakKeyDictionary[Any, _Pair] = kept_with(target, "drafters", weakref.WeakKeyDictionary)
    return pairs.setdefault(drafter, _Pair())


def has_other_tokens(drafter: HSDraftNetwork, tokenizer: Any) -> bool:
    """Whether a tokenizer is known to differ from the drafter's target's."""
    recorded = drafter.config.target_tokenizer_hash
    return tokenizer is not None and bool(recorded) and tokenizer_hash(tokenizer) != recorded


def warn_of_poor_guesses(target: Any, drafter: HSDraftNetwork, drafts: int, right: int) -> None:
    """Adds the counts of a call, see `_Pair`; warns once if another target explains poor drafts."""
    reference, seen = drafter.config.target_reference, _pair(target, drafter)
    if reference is None or seen.drafts >= FIT_TRUSTED:
        return
    seen.drafts, seen.right = seen.drafts + drafts, seen.right + right
    expected = reference["drafted"] / max(len(reference["input_ids"]) - reference["start"], 1)
    if seen.drafts >= FIT_JUDGED and seen.right < FIT_ENOUGH * expected * seen.drafts:
        warn_of_mismatch(target, drafter)


def warn_of_mismatch(target: Any, drafter: HSDraftNetwork, tokenizer: Any = None) -> None:
    """Logs `explain_mismatch`, once."""
    pair = _pair(target, drafter)
    if pair.warned:
        return
    pair.warned = True
    try:
        problem = explain_mismatch(target, drafter, tokenizer)
    except Exception as error:  # never fail a call because of a warning
        logger.info(f"whether this drafter was made for this target could not be measured: {error}")
        return
    if problem:
        logger.warning(problem)
