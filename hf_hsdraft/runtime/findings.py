"""What targets do with drafts: found out by trying (`trial`), and remembered for as long as they live.

A finding holds for drafts up to the size that was tried, and for texts up to some length (`known_until`): a target may
read longer texts differently, for instance where it drops keys. That drafts are misread may be due to a single text. So
it counts for later calls once a second one has found it too, and is forgotten if that one reads them correctly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.tensors import device_of
from .cache_slots import cache_layers, layer_class
from .misreading import is_full, rounds_inputs
from .module_hooks import fingerprint
from .target_limits import known_until, slots_read_alike, text_config
from .target_runtime import TargetRuntime
from .trial import KEPT, LEAST_DEPTH, LEAST_WIDTH, OTHERWISE, STEPS, problem_of

_ROWS = 2  # of a batch that trees are tried with: more only take longer
_ROUNDED = "its products round what they are given, so its text depends on how many tokens are read at once"


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


@dataclass(frozen=True)
class Size:
    """Size of a call's drafts.

    Attributes:
        columns: of a tree of each row, root included.
        tokens: of a forward over all rows.
        depth: of a tree.
        chain: depth of a chain.
    """

    columns: int
    tokens: int
    depth: int
    chain: int


def find_out(
    runtime: TargetRuntime,
    input_ids: torch.Tensor,
    size: Size,
    reach: int,
    chains: bool = False,
    ragged: bool = False,
    tries: bool = True,
    doubling: bool = True,
    in_any: Callable[[bool], bool] = bool,
) -> Finding | None:
    """What a target does with the drafts of a call from here on; `None` if it is unknown and cannot be tried here.

    Args:
        input_ids: `[B, length]`, the texts with their last tokens, which the target has not read yet.
        size: of the drafts that are wanted. They may be no deeper than the finding says.
        reach: number of positions after each text that a forward may read.
        chains: whether no trees will be drafted in any case.
        ragged: whether rows may differ in length, where only trees can be read. If they are misread, each row continues
            with trees of one node: plain decoding of a batch under a mask of kept slots.
        tries: whether to try what is unknown.
        doubling: see `known_until`.
        in_any: whether a flag is set in any process, where all have to run the same forwards.
    """
    target, length = runtime.target, runtime.length + 1
    layer = next((each for each in map(layer_class, cache_layers(runtime.cache)) if not _is_known(each)), None)
    if layer is not None and runtime.rows.padded:
        return Finding(False, False, f"its cache ({layer.__name__}) is not known to keep padding and drafts apart")
    at = max([length, *(runtime.rows.next_positions or ())])  # the caller's positions may be ahead of the text
    named = known_until(target, at, doubling=False) - at
    depth = min(max(size.depth, size.chain, LEAST_DEPTH), reach, runtime.deepest, max(named, LEAST_DEPTH))
    width = 1 << (size.tokens + depth - 1).bit_length()  # a power of two, so that most calls share trials
    width = min(width, min(runtime.slots.left, slots_read_alike(target, runtime.length)) - KEPT)
    if not chains:
        depth = min(depth, width - LEAST_WIDTH + LEAST_DEPTH)
    kind = (*kind_of_call(runtime), runtime.given, chains, ragged)
    found = _known(target, kind, length, size.tokens, depth, doubling)
    fits = chains or width >= max(size.columns, LEAST_WIDTH)
    if in_any(depth < LEAST_DEPTH or (found is None and not (tries and fits))):
        return None
    if in_any(found is None):
        found = _tried(runtime, input_ids, size, depth, width, chains, ragged, in_any)
        found = _remembered(target, kind, found, doubling)
    return found


def _is_known(layer: type) -> bool:
    return layer.__module__ == "transformers.cache_utils"


def _tried(
    runtime: TargetRuntime,
    input_ids: torch.Tensor,
    size: Size,
    depth: int,
    width: int,
    chains: bool,
    ragged: bool,
    in_any: Callable[[bool], bool],
) -> Finding:
    def found(trees: bool, able: bool, reason: str = "", misread: bool = False) -> Finding:
        tokens = max(size.tokens, width if trees else 0)
        return Finding(trees, able, reason, tokens, depth, runtime.length + 1, misread)

    exact = is_full(runtime.target.dtype) and torch.get_float32_matmul_precision() == "highest"
    if exact and rounds_inputs(runtime.target):
        return found(False, False, _ROUNDED, misread=True)
    reason, misread = "", False
    if not chains:
        few, rows = _of_few_rows(runtime)
        reason = few.prepare_trees()
        if not reason:
            problem, by_number = problem_of(few, input_ids[rows], STEPS, (depth, width), ragged)
            if not in_any(bool(problem)):
                return found(True, True)
            if not in_any(not by_number):  # chains are no better
                return found(False, False, f"{width} tokens at once are {problem or OTHERWISE}", misread=True)
            reason, misread = f"the branches of a tree are {problem or OTHERWISE}", True
    if ragged:
        return found(False, False, reason, misread)
    problem, _ = problem_of(runtime, input_ids, max(min(size.chain, depth), LEAST_DEPTH) + 1)
    if not in_any(bool(problem)):
        return found(False, True, reason, misread)
    return found(False, False, f"several tokens at once are {problem or OTHERWISE}", misread=True)


def _of_few_rows(runtime: TargetRuntime) -> tuple[TargetRuntime, list[int]]:
    """A runtime of the shortest and the longest text, which show as much as all do, and their places; or of all."""
    rows = list(range(len(runtime.rows.kept)))
    if len(rows) <= _ROWS or not runtime.rows_can_be_apart:
        return runtime, rows
    lengths = runtime.rows.lengths
    first, *_, last = sorted(rows, key=lambda row: lengths[row])
    return runtime.apart_of([first, last]), [first, last]


# By target and kind of call. Bounded, for targets that change from call to call.
_findings: weakref.WeakKeyDictionary[Any, dict[Any, list[Finding]]] = weakref.WeakKeyDictionary()
_MOST_KINDS, _MOST_FINDINGS = 64, 16


def _known(target: Any, kind: Any, length: int, tokens: int, depth: int, doubling: bool) -> Finding | None:
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


def _remembered(target: Any, kind: Any, finding: Finding, doubling: bool) -> Finding:
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
