"""What targets were found to do with drafts, remembered for as long as they live. `trial` finds it out.

A finding holds for drafts up to the size that was tried, and for texts up to some length (`known_until`): a target may
read longer texts differently, for instance where it drops keys. That drafts are misread may be due to a single text. So
it counts for later calls once a second one has found it too, and is forgotten if that one reads them correctly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.tensors import device_of
from .cache_slots import cache_layers, layer_class
from .module_hooks import fingerprint
from .target_limits import known_until, text_config
from .target_runtime import TargetRuntime


@dataclass(frozen=True)
class Finding:
    """What a target does with drafts.

    Attributes:
        trees: whether it reads them correctly.
        chains: the same. Not tried where trees are read.
        reason: why it reads no trees, or no drafts at all.
        tokens: number of tokens of the forwards that it was found with.
        depth: of the drafts.
        length: of the text.
        misread: whether it reads less than model and cache promise.
        times: number of calls that have found it misread.
        until: length of text up to which this holds.
    """

    trees: bool
    chains: bool
    reason: str = ""
    tokens: int = 0
    depth: int = sys.maxsize
    length: int = 0
    misread: bool = False
    times: int = 1
    until: int = sys.maxsize


# By target and kind of call. Bounded, for targets that change from call to call.
_findings: weakref.WeakKeyDictionary[Any, dict[Any, list[Finding]]] = weakref.WeakKeyDictionary()
_MOST_KINDS, _MOST_FINDINGS = 64, 16


def known(target: Any, kind: Any, length: int, tokens: int, depth: int, doubling: bool) -> Finding | None:
    """The finding for a text of `length` tokens and for drafts of this size; `None` if there is none.

    Args:
        kind: of the call, see `kind_of_call`, and of its drafts.
        doubling: see `known_until`.
    """
    every = _findings.get(target, {}).get(kind, ())
    found = [replace(each, until=known_until(target, each.length, doubling)) for each in every]
    misread = [each for each in found if each.misread and each.times > 1 and each.tokens <= tokens]
    for each in misread:
        if each.length <= length <= each.until:
            return each
    right = [each for each in found if not each.misread and each.tokens >= tokens and each.depth >= depth]
    furthest = max(right, key=lambda each: each.until, default=None)
    if furthest is None or furthest.until < length:
        return None
    until = min([furthest.until, *(each.length - 1 for each in misread if each.length > length)])
    return replace(furthest, until=until)


def remembered(target: Any, kind: Any, finding: Finding, doubling: bool) -> Finding:
    """Remembers a finding for later calls; returns it with the length up to which it holds."""
    kinds = _findings.setdefault(target, {})
    while len(kinds) > _MOST_KINDS:
        kinds.pop(next(iter(kinds)), None)
    kept, others = finding, kinds.get(kind, [])
    if finding.misread:
        same = [finding, *(each for each in others if each.misread and each.times == 1)]
        length, tokens = min(each.length for each in same), max(each.tokens for each in same)
        kept, others = replace(finding, length=length, tokens=tokens, times=len(same)), _without(others, same)
    else:
        others = _without(others, [each for each in others if _outdated(each, finding)])
    kinds[kind] = [*others, kept][-_MOST_FINDINGS:]
    return replace(finding, until=known_until(target, finding.length, doubling))


def _without(findings: Sequence[Finding], some: Sequence[Finding]) -> list[Finding]:
    return [each for each in findings if each not in some]


def _outdated(each: Finding, by: Finding) -> bool:
    if each.misread:
        return each.times == 1 and each.length <= by.length
    return each.length <= by.length and each.tokens <= by.tokens and each.depth <= by.depth


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
