"""Is this the target that a drafter was made for? Told by what it writes, not by what it is called.

The text never depends on it, only how much of it is drafted. So a drafter carries a short text that its target wrote
greedily. A fine-tuned target, or one with other tokens, would have gone on otherwise in places, and the drafter guesses
less of it from that target's hidden states: both are counted in one forward, once for a target and a drafter.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from .modeling_hsdraft import HSDrafter

logger = logging.get_logger(__name__)

# Another dtype or four-bit weights change a few choices in a hundred, training changes more.
ENOUGH_AGREEMENT = 0.9


@dataclass(frozen=True)
class TargetMatch:
    """How a target does on a text, of which tokens from some position on are looked at.

    Attributes:
        tokens: looked at.
        agreed: that are this target's own greedy choice.
        drafted: that are the drafter's first choice, one token ahead, given this target's hidden states.
    """

    tokens: int
    agreed: int
    drafted: int


@torch.no_grad()
def measure_match(target: Any, drafter: HSDrafter, input_ids: Sequence[int], start: int) -> TargetMatch:
    """Reads a text once and counts the choices of target and drafter from position `start` on, which is 2 at least."""
    ids = torch.tensor([list(input_ids)], device=target.device)
    places = torch.arange(ids.shape[1], device=target.device)
    # Models whose positions depend on images would otherwise note here what they are in a text without any.
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters
    positions = {"position_ids": places[None]} if takes_positions else {}
    taps = list(drafter.config.target_tap_layers)
    output = target(ids, **positions, output_hidden_states=taps, use_cache=False)
    choices = output.logits[0, start - 1 : -1].argmax(dim=-1)
    wanted = ids[0, start:]
    # The layers of a target may lie on several devices.
    states = [output.hidden_states[layer][0, :-1].to(drafter.device, drafter.dtype) for layer in taps]
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    hidden = drafter(
        torch.cat(states, dim=-1),
        weights.embed(ids[0, 1:]),
        places[:-1].to(drafter.device),
        starts=places[start - 2 : -2].to(drafter.device),
        num_draft_steps=1,
    ).hidden_states[0]
    guesses = weights.vocab_ids[drafter.logits(hidden, weights).argmax(dim=-1)]
    return TargetMatch(
        tokens=len(wanted),
        agreed=int((choices == wanted.to(choices.device)).sum()),
        drafted=int((guesses == wanted.to(guesses.device)).sum()),
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """A digest of a tokenizer's tokens and their ids, 16 hexadecimal digits."""
    known = _hashes.get(tokenizer)
    if known is None:
        vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        known = _hashes[tokenizer] = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
    return known


def explain_mismatch(target: Any, drafter: HSDrafter, tokenizer: Any = None) -> str:
    """Why a drafter may draft little for a target, with what was measured; empty if it was made for this one.

    Args:
        tokenizer: the target's, if it is at hand.
    """
    config = drafter.config
    made_for = f"this drafter was made for {config.target_name or 'another target'}"
    theirs = "" if tokenizer is None or not config.target_tokenizer_hash else tokenizer_hash(tokenizer)
    other_tokens = bool(theirs) and theirs != config.target_tokenizer_hash
    if config.target_reference is None:
        return f"{made_for}, whose tokenizer is another one: hardly anything may be accepted" if other_tokens else ""
    match = _known.setdefault(target, weakref.WeakKeyDictionary()).get(drafter)
    if match is None:
        reference = config.target_reference
        match = _known[target][drafter] = measure_match(target, drafter, reference["input_ids"], reference["start"])
    if match.agreed >= ENOUGH_AGREEMENT * match.tokens:
        return ""  # whatever it is called
    reference = config.target_reference
    cause = "its tokenizer is another one" if other_tokens else "it was trained further, or is another model"
    return (
        f"{made_for}, and this target differs from it ({cause}): of {match.tokens} tokens which that one wrote it "
        f"would choose {match.agreed} (that one {reference['agreed']}), and the drafter's first guess is right for "
        f"{match.drafted} (there {reference['drafted']}). The text stays this target's own, but less of it is drafted; "
        "`hsdraft train --init-from` adapts the drafter"
    )


def warn_of_mismatch(target: Any, drafter: HSDrafter, tokenizer: Any = None) -> None:
    """Warns of it, once for a target and a drafter."""
    warned = _warned.setdefault(target, weakref.WeakSet())
    if drafter in warned or target.config.is_encoder_decoder:
        return
    try:
        problem = explain_mismatch(target, drafter, tokenizer)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a warning is no reason to fail where decoding works
        logger.info(f"whether this drafter was made for this target could not be measured: {error}")
        problem, tokenizer = "", True
    if problem or tokenizer is not None:
        warned.add(drafter)
    if problem:
        logger.warning(problem)


_hashes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[HSDrafter, TargetMatch]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakKeyDictionary[Any, weakref.WeakSet[HSDrafter]] = weakref.WeakKeyDictionary()
