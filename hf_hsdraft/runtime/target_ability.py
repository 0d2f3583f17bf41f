"""What targets were found to do, remembered for as long as they live. `target_probe` finds it out.

It counts for texts up to some length, see `known_until`: a target may read longer ones otherwise, for instance where it
drops keys. That a target reads no drafts at all may be the fault of a single call or text. It counts once a second call
has found it too, for texts as long as theirs, and no more once a text as long was read rightly.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..core.tensors import device_of
from ..core.tuning import TUNING
from .cache_slots import cache_layers, layer_class
from .fingerprint import fingerprint
from .target_limits import known_until, text_config
from .target_runtime import TargetRuntime


@dataclass(frozen=True)
class Ability:
    """What a target was found to do.

    Attributes:
        trees: whether it reads them rightly.
        chains: whether it reads them rightly. They are not tried where trees are read: then none is drafted.
        reason: why it reads no trees, or no drafts at all.
        unclear: whether other tokens might tell more; no trees until then.
        doubtful: whether the verdict is too near its threshold to be kept.
        tried: length of the longest text that it was found with.
        until: length of text up to which that counts.
    """

    trees: bool
    chains: bool
    reason: str = ""
    unclear: bool = False
    doubtful: bool = False
    tried: int = 0
    until: int = sys.maxsize


@dataclass(frozen=True)
class _Refusal:
    """That a target was found to read no drafts.

    Attributes:
        reason: why.
        since: length of the shortest text that it was found with.
        tried: length of the longest one.
        times: how often it was found.
    """

    reason: str
    since: int
    tried: int
    times: int = 1


_Known = weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[bool, Ability]]]
_Refused = weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Refusal]]

# Where a target changes from call to call, only the last few findings are kept.
_MOST_KINDS = 64

# By target and kind of call; one for trees and one for chains alone, which may have been found at other lengths.
known: _Known = weakref.WeakKeyDictionary()
refused: _Refused = weakref.WeakKeyDictionary()
_doubts: weakref.WeakKeyDictionary[Any, Counter[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def known_ability(
    runtime: TargetRuntime, doubling: bool = True, chains: bool = False, ragged: bool = False
) -> Ability | None:
    """What is known of the target of a call, for calls of its kind and length; `None` if it has to be tried.

    Args:
        doubling: see `known_until`.
        chains: no trees will be drafted, whatever the target can do.
        ragged: the rows may be at different lengths, where only trees can be read.
    """
    unknown = [type(layer).__name__ for layer in cache_layers(runtime.cache) if not _is_known(layer)]
    if unknown and runtime.rows.attended is not None:
        return Ability(False, False, f"its cache ({unknown[0]}) is not known to keep padding and drafts apart")
    target, length, kind = runtime.target, runtime.length + 1, kind_of_call(runtime)
    refusal = refused.get(target, {}).get(_kind_of_refusal(kind, runtime, chains, ragged))
    since = refusal.since if refusal is not None and refusal.times > 1 else sys.maxsize
    found = known.get(target, {}).get((*kind, chains), {}).values()
    for ability in sorted(found, key=lambda ability: ability.tried):
        until = known_until(target, ability.tried, doubling)
        if any(ability.tried < other.tried <= until for other in found):  # another one was found sooner than that
            until = ability.tried
        if ability.tried < since:
            until = min(until, since - 1)
        if length <= until:
            return replace(ability, until=until)
    if refusal is not None and length >= since:
        until = known_until(target, refusal.tried, doubling)
        if length <= until:
            return Ability(False, False, refusal.reason, tried=refusal.tried, until=until)
    return None


def remembered(
    ability: Ability,
    runtime: TargetRuntime,
    length: int,
    doubling: bool = True,
    chains: bool = False,
    ragged: bool = False,
) -> Ability:
    """What was found in a call with texts of `length` tokens, kept for later calls; see `known_ability`.

    A doubtful verdict holds for this call alone, unless several calls in a row come to doubtful ones.
    """
    refusals, of_call = refused.setdefault(runtime.target, {}), kind_of_call(runtime)
    kind = _kind_of_refusal(of_call, runtime, chains, ragged)
    doubts = _doubts.setdefault(runtime.target, Counter())
    for kept in (refusals, known.get(runtime.target, {}), doubts):
        while len(kept) > _MOST_KINDS:
            kept.pop(next(iter(kept)), None)
    doubts[kind] = doubts[kind] + 1 if ability.doubtful or ability.unclear else 0
    if 0 < doubts[kind] < TUNING.most_doubts:
        return replace(ability, tried=length, until=known_until(runtime.target, length, doubling))
    before = refusals.get(kind)
    if ability.chains:
        found = known.setdefault(runtime.target, {}).setdefault((*of_call, chains), {})
        sooner = found.get(ability.trees)
        found[ability.trees] = replace(ability, tried=max(length, sooner.tried if sooner else 0))
        if before is not None and length >= before.since:
            refusals.pop(kind, None)  # another call may have done so
    elif before is None:
        refusals[kind] = _Refusal(ability.reason, length, length)
    else:
        since, tried = min(before.since, length), max(before.tried, length)
        refusals[kind] = _Refusal(ability.reason, since, tried, before.times + 1)
    return replace(ability, tried=length, until=known_until(runtime.target, length, doubling))


def kind_of_call(runtime: TargetRuntime) -> tuple[Any, ...]:
    """All that what a target can do may depend on."""
    target = runtime.target
    layers = tuple(layer_class(layer).__name__ for layer in cache_layers(runtime.cache))
    attention = text_config(target)._attn_implementation
    device = device_of(target)
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    rows = runtime.num_texts > 1
    call = device, target.training, cast, type(runtime.cache), layers, rows, runtime.rows.attended is not None
    return fingerprint(target), attention, *call


def _kind_of_refusal(kind: tuple[Any, ...], runtime: TargetRuntime, chains: bool, ragged: bool) -> tuple[Any, ...]:
    """A call may be refused for what it gives to the target."""
    return *kind, runtime.given, chains, ragged


def _is_known(layer: Any) -> bool:
    return layer_class(layer).__module__ == CacheLayerMixin.__module__
