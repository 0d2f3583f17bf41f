"""Caches what targets were found to do, for as long as they live. `target_probe` finds it out.

A finding holds up to some text length, see `known_until`: a target may read longer texts differently, for instance
where it drops keys. That a target reads no drafts at all may be due to a single call or text. It is used once a second
call has confirmed it, for texts at least as long, and discarded once such a text was read correctly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..core.tensors import device_of
from ..core.tuning import TUNING
from .cache_slots import cache_layers, layer_class
from .module_hooks import fingerprint
from .target_limits import known_until, text_config
from .target_runtime import TargetRuntime


@dataclass(frozen=True)
class Ability:
    """What a target was found to do.

    Attributes:
        trees: whether it reads them correctly.
        chains: whether it reads them correctly. Not tried where trees are read.
        reason: why it reads no trees, or no drafts at all.
        unclear: whether other tokens might give a clear result; no trees until then.
        doubtful: whether the result is too near its threshold to be cached.
        tried: length of the longest text that it was found with.
        until: length of text up to which it holds.
    """

    trees: bool
    chains: bool
    reason: str = ""
    unclear: bool = False
    doubtful: bool = False
    tried: int = 0
    until: int = sys.maxsize


@dataclass(frozen=True)
class _Refusals:
    """That a target was found to read no drafts, `times` times, with texts of `since` to `tried` tokens.

    `doubts` is the number of doubtful trials since the last clear one.
    """

    reason: str = ""
    since: int = sys.maxsize
    tried: int = 0
    times: int = 0
    doubts: int = 0


@dataclass
class _Postponed:
    """Rounds of batches since the last trial, and what that found if it was doubtful."""

    rounds: int = 0
    ability: Ability | None = None


# Bounds the cache for targets that change from call to call.
_MOST_KINDS = 64

# By target and kind of call; separate for trees and for chains alone, which may have been found at other lengths.
known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[bool, Ability]]] = weakref.WeakKeyDictionary()
_refused: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Refusals]] = weakref.WeakKeyDictionary()
_postponed: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Postponed]] = weakref.WeakKeyDictionary()


def known_ability(
    runtime: TargetRuntime, doubling: bool = True, chains: bool = False, ragged: bool = False
) -> Ability | None:
    """The cached ability for a call's kind and length; `None` if it has to be tried.

    Args:
        doubling: see `known_until`.
        chains: whether no trees will be drafted in any case.
        ragged: whether rows may differ in length, where only trees can be read.
    """
    unknown = [type(layer).__name__ for layer in cache_layers(runtime.cache) if not _is_known(layer)]
    if unknown and runtime.rows.padded:
        return Ability(False, False, f"its cache ({unknown[0]}) is not known to keep padding and drafts apart")
    target, length, kind = runtime.target, runtime.length + 1, _kind_of_drafts(runtime)
    refusals = _refused.get(target, {}).get(_kind_of_refusal(kind, runtime, chains, ragged), _Refusals())
    since = refusals.since if refusals.times > 1 else sys.maxsize
    found = list(_found(target, kind, chains))
    for ability in sorted(found, key=lambda ability: ability.tried):
        until = known_until(target, ability.tried, doubling)
        if any(ability.tried < other.tried <= until for other in found):  # another finding lies between
            until = ability.tried
        if ability.tried < since:
            until = min(until, since - 1)
        if length <= until:
            return replace(ability, until=until)
    if length >= since:
        until = known_until(target, refusals.tried, doubling)
        if length <= until:
            return Ability(False, False, refusals.reason, tried=refusals.tried, until=until)
    return None


def _found(target: Any, kind: tuple[Any, ...], chains: bool) -> Iterator[Ability]:
    """What was found with drafts of this size, or of larger ones, by which the smaller are read too."""
    size = kind[-_SIZES:]
    # Lists, as other threads may add findings meanwhile.
    for (*other, of_chains), abilities in list(known.get(target, {}).items()):
        larger = all(more >= each for more, each in zip(other[-_SIZES:], size, strict=True))
        if of_chains == chains and larger and tuple(other[:-_SIZES]) == kind[:-_SIZES]:
            yield from list(abilities.values())


def trial_is_due(runtime: TargetRuntime, rounds: int) -> bool:
    """Whether to try the target of a batch whose ability is unknown, in a call of up to `rounds` rounds.

    A trial takes as long as some plain rounds, which a short call does not win back. So a target is tried once its
    batches have had so many rounds that a trial hardly counts. Until then `doubtful_ability` is all that is known.
    """
    kinds, target = _postponed.setdefault(runtime.target, {}), runtime.target
    while len(kinds) > _MOST_KINDS:
        kinds.pop(next(iter(kinds)))
    waiting = kinds.setdefault(_kind_of_drafts(runtime), _Postponed())
    waiting.rounds += rounds
    due = waiting.rounds >= _rounds_before_a_trial(target)
    if due:
        waiting.rounds = 0
    return due


def postpones_trials(target: Any) -> bool:
    """Whether batches of a target decode plainly before they are tried."""
    return _rounds_before_a_trial(target) > 0


def _rounds_before_a_trial(target: Any) -> int:
    return TUNING.trial_rounds_half if target.dtype.itemsize < 4 else TUNING.trial_rounds


def doubtful_ability(runtime: TargetRuntime) -> Ability | None:
    """What the last trial of such a batch has found, if it was doubtful and holds for this length of text."""
    waiting = _postponed.get(runtime.target, {}).get(_kind_of_drafts(runtime), _Postponed())
    ability = waiting.ability
    return ability if ability is not None and runtime.length < ability.until else None


def remembered(
    ability: Ability,
    runtime: TargetRuntime,
    length: int,
    doubling: bool = True,
    chains: bool = False,
    ragged: bool = False,
) -> Ability:
    """Caches what was found with texts of `length` tokens for later calls; see `known_ability`.

    A doubtful result holds for this call only, in batches until their next trial, unless several are doubtful in a row.
    """
    refused, of_call = _refused.setdefault(runtime.target, {}), _kind_of_drafts(runtime)
    for kept in (refused, known.get(runtime.target, {})):
        while len(kept) > _MOST_KINDS:
            kept.pop(next(iter(kept)), None)
    kind = _kind_of_refusal(of_call, runtime, chains, ragged)
    refusals = refused.get(kind, _Refusals())
    doubts = refusals.doubts + 1 if ability.doubtful or ability.unclear else 0
    in_doubt = 0 < doubts < TUNING.most_doubts
    found = replace(ability, tried=length, until=known_until(runtime.target, length, doubling))
    if (waiting := _postponed.get(runtime.target, {}).get(of_call)) is not None:
        waiting.ability = found if in_doubt and ability.chains and not chains else None
    if in_doubt or (ability.chains and length < refusals.since):
        refused[kind] = replace(refusals, doubts=doubts)
    elif ability.chains:
        refused[kind] = _Refusals(doubts=doubts)
    else:
        since, tried = min(refusals.since, length), max(refusals.tried, length)
        refused[kind] = _Refusals(ability.reason, since, tried, refusals.times + 1, doubts)
    if ability.chains and not in_doubt:
        abilities = known.setdefault(runtime.target, {}).setdefault((*of_call, chains), {})
        sooner = abilities.get(ability.trees)
        abilities[ability.trees] = replace(ability, tried=max(length, sooner.tried if sooner else 0))
    return found


def kind_of_call(runtime: TargetRuntime) -> tuple[Any, ...]:
    """What a target's forwards in a call may depend on."""
    target = runtime.target
    layers = tuple(layer_class(layer).__name__ for layer in cache_layers(runtime.cache))
    attention = text_config(target)._attn_implementation
    device = device_of(target)
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    rows = runtime.num_texts > 1
    call = device, target.training, cast, type(runtime.cache), layers, rows, runtime.rows.padded
    return fingerprint(target), attention, *call


_SIZES = 2  # at the end of the key


def _kind_of_drafts(runtime: TargetRuntime) -> tuple[Any, ...]:
    """Cache key of abilities: what was found with small drafts tells nothing of larger ones."""
    return *kind_of_call(runtime), *runtime.drafts


def _kind_of_refusal(kind: tuple[Any, ...], runtime: TargetRuntime, chains: bool, ragged: bool) -> tuple[Any, ...]:
    """Cache key of refusals, which may also be due to the target's inputs."""
    return *kind, runtime.given, chains, ragged


def _is_known(layer: Any) -> bool:
    return layer_class(layer).__module__ == CacheLayerMixin.__module__
