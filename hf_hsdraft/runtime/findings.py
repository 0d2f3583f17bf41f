"""What targets do with drafts: found out by trying, and remembered for as long as they live.

There is no hard-coded list of supported models. After the prompt, on a runtime apart, likely tokens root, p1, p2, p3
are read one at a time: the truth. Then they are read again in two drafts, and the logits are compared.

- The first draft has wrong siblings before the path p1, p2. They are misread if siblings are not hidden from them, or
  if slots are taken for positions. p1 is kept, and all else rejected.
- The second draft continues from p2, and is as wide and as deep as the call's: copies of p3 stand before, below and
  behind it. So p3 and its copies are misread if p1 was not kept rightly, or if some of so many tokens are dropped.

A chain is tried in the same way: part of it is kept, and read on from. In half precision a misreading may be as small
as rounding. So the target shows how large its rounding is: tokens are also read in several columns that do not see each
other.

A finding holds for drafts up to the size that was tried, and for texts up to some length (`known_until`): a target may
read longer texts differently, for instance where it drops keys. That drafts are misread may be due to a single text. So
it counts for later calls once a second one has found it too, and is forgotten if that one reads them correctly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..core.tensors import device_of
from .cache_slots import cache_layers, layer_class
from .foreign_parts import any_harmless
from .misreading import computing_dtype, distances_of, is_full, measured_tolerance, rounds_inputs, usual_tolerance
from .module_hooks import experience_of, fingerprint
from .target_limits import known_until, slots_read_alike, text_config
from .target_runtime import TargetRuntime
from .tree_reading import read_trees

STEPS = 4  # root, p1, p2, p3
LEAST_DEPTH = STEPS - 1
KEPT = 2  # root and p1
_WRONG, _FEW = 8, 3  # wrong siblings of the first draft, and of the second
LEAST_WIDTH = _FEW + 4  # of the second draft: root, p3, and two copies
_NOISY = 2  # number of tokens whose rounding is measured
OTHERWISE = "read otherwise than one by one"
_TOO_FEW = "not tried, as its vocabulary is too small"


def problem_of(
    runtime: TargetRuntime,
    input_ids: torch.Tensor,
    steps: int,
    tree: tuple[int, int] | None = None,
    ragged: bool = False,
) -> tuple[str, bool]:
    """How reading likely tokens as two drafts differs from reading `steps` of them one at a time; empty if it does not.

    Returns also whether the first draft is read rightly. `tree` is the depth that both have together, and the width of
    the second; chains if there is none.
    """
    first_is_right = False
    try:
        truth = _truth(runtime, input_ids, steps, tree[1] if tree else steps, ragged)
        if truth is None:
            return _TOO_FEW, False
        kept, none = 1 if tree else (steps - 2) // 2, [list[int]()] * len(truth.tokens)
        rest = [row[kept + 1 :] for row in truth.tokens]
        if tree is None:
            drafts = _Draft.of(truth.tokens, none), _Draft.of(rest, none)
        else:
            depth, width = tree
            wrong, few = ([row[:count] for row in truth.wrong] for count in (width - 1, _FEW))
            below, spare = depth - LEAST_DEPTH, width - 2 - len(few[0])
            drafts = _Draft.of([row[:-1] for row in truth.tokens], wrong), _Draft.of(rest, few, below, spare - below)
        paths, others = list[torch.Tensor](), list[torch.Tensor]()
        with _apart(runtime) as reader:
            reader.trees = tree is not None
            for draft, begin in zip(drafts, (0, kept + 1), strict=True):
                texts, path = truth.ids[:, : input_ids.shape[1] + begin], draft.path
                logits, true = reader.verify(draft.trees, texts).logits, truth.logits[:, begin : begin + len(path)]
                paths.append(distances_of(logits[:, path], true))
                if draft.copies:
                    others += (distances_of(logits[:, each], logits[:, path[1:2]]) for each in (draft.copies, [-1]))
                elif tree is None:
                    others.append(distances_of(logits[:, -1:], true[:, -1:]))
                first_is_right = truth.explains(paths[0])
                reader.commit([path[1 : kept + 1]] * len(draft.trees))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's code raises, it cannot read this draft
        line = next(iter(str(error).strip().splitlines()), "no message")
        return f"refused by its forward ({type(error).__name__}: {line[:160]})", first_is_right
    right = all(map(truth.explains, (torch.cat(paths), *others)))
    return "" if right else OTHERWISE, first_is_right


@contextlib.contextmanager
def _apart(runtime: TargetRuntime) -> Iterator[TargetRuntime]:
    """A runtime that reads on from the same state, which the cache has again afterwards."""
    outer = runtime.apart()
    mark = outer.slots.mark(before_commit=True, whole=any_harmless())
    try:
        yield outer.apart()
    finally:
        outer.slots.restore(mark)


@dataclass(frozen=True)
class _Truth:
    """Tokens that a target has read one at a time."""

    ids: torch.Tensor  # `[B, length + steps - 1]`, the texts with the tokens, of which the first ends the text
    tokens: list[list[int]]  # `[B][steps]`
    logits: torch.Tensor  # `[B, steps, V]`
    wrong: list[list[int]]  # of each row, other tokens that are likely after the first
    tolerance: float  # distance of logits that rounding explains
    # One in so many distances may be larger. In half precision a near tie of an expert router may change a position;
    # long chains of unlikely text are noisy in full precision too.
    spared: int

    def explains(self, distances: torch.Tensor) -> bool:
        """Whether rounding explains distances of logits."""
        count = len(distances) - len(distances) // self.spared
        return float(distances.kthvalue(count).values) <= self.tolerance


def _truth(runtime: TargetRuntime, input_ids: torch.Tensor, steps: int, width: int, ragged: bool) -> _Truth | None:
    """Reads the last tokens of the texts `[B, length]` and likely ones after them; `None` if there are too few.

    In half precision some are also read in `width` columns that do not see each other. Both the first and the last
    column must equal the token read alone, up to rounding. A target that misreads several tokens at once may change
    one of the two, so the smaller distance is the rounding.
    """
    length, noise, blocks = input_ids.shape[1], 0.0, runtime.acceleration.has_blocks
    with _apart(runtime) as reader:
        reader.trees = ragged
        logits = [_read_one(reader, input_ids)]
        dtype = computing_dtype(logits[0], runtime.target.dtype)
        tolerance, measured = usual_tolerance(dtype), not is_full(dtype) and not reader.prepare_trees()
        # Likely tokens are ordinary text, not image markers or the like.
        roots = input_ids[:, -1].tolist()
        likely = [_likely(*each, LEAST_DEPTH + _WRONG) for each in zip(logits[0], roots, strict=True)]
        if min(map(len, likely)) <= LEAST_DEPTH:
            return None
        path = [[row[min(step, LEAST_DEPTH) - 1] for step in range(1, steps)] for row in likely]
        ids = torch.cat([input_ids, input_ids.new_tensor(path)], dim=1)
        for step in range(1, steps):
            text = ids[:, : length + step]
            columns = _in_columns(reader, text, width) if measured and step <= _NOISY else None
            logits.append(_read_one(reader, text))
            if columns is not None:
                noise = max(noise, min(float(distances_of(columns[:, at], logits[-1]).max()) for at in (0, -1)))
                tolerance = measured_tolerance(dtype, noise, blocks)
    tokens = ids[:, length - 1 :].tolist()
    spared = 4 if not is_full(dtype) else 8 if steps > STEPS else sys.maxsize
    return _Truth(ids, tokens, torch.stack(logits, dim=1), [row[LEAST_DEPTH:] for row in likely], tolerance, spared)


def _likely(logits: torch.Tensor, root: int, count: int) -> list[int]:
    """The most likely tokens by logits `[V]` but the root: repeated tokens could stand for each other."""
    return [token for token in logits.topk(min(count + 1, len(logits))).indices.tolist() if token != root][:count]


def _read_one(reader: TargetRuntime, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, V]` of the last token of each row, which stays read."""
    roots = [DraftTree.root(token) for token in input_ids[:, -1].tolist()]
    logits = reader.verify(roots, input_ids).logits[:, 0]
    reader.commit([[]] * len(roots))
    return logits


def _in_columns(reader: TargetRuntime, input_ids: torch.Tensor, width: int) -> torch.Tensor | None:
    """Logits `[B, width, V]` of columns that each read the last token of their row; `None` if that fails."""
    roots = [DraftTree.root(token) for token in input_ids[:, -1].tolist()]
    try:
        with _apart(reader) as other:
            return read_trees(other, roots, width, other.kinds).logits[:, -width:]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # trees will fail too, and chains may not
        return None


@dataclass(frozen=True)
class _Draft:
    """A draft of each row, with the nodes of its path, and of the copies of the path's first token after the root."""

    trees: list[DraftTree]
    path: list[int]
    copies: list[int]

    @classmethod
    def of(cls, paths: Sequence[list[int]], wrong: Sequence[list[int]], below: int = 0, copies: int = 0) -> _Draft:
        """Paths behind wrong siblings and half of the copies; `below` further copies are below, the rest behind."""
        deep, aside = len(paths[0]) - 1, min(map(len, wrong), default=0)
        first, behind = 1 + aside + copies // 2, copies - copies // 2
        parents = (-1, *[0] * first, *range(first, first + deep + below - 1), *[0] * behind)
        depths = (0, *[1] * (first - 1), *range(1, deep + below + 1), *[1] * behind)
        trees = []
        for (root, *path), others in zip(paths, wrong, strict=True):
            same = path[:1]
            tokens = root, *others[:aside], *same * (copies // 2), *path, *same * (below + behind)
            trees.append(DraftTree(tokens, parents, depths, (0.0,) * len(tokens)))
        nodes = [*range(1 + aside, first), *range(first + deep + below, len(parents))]
        return cls(trees, [0, *range(first, first + deep)], nodes)


_ROWS = 2  # of a batch that trees are tried with: more only take longer
_ROUNDED = "its products round what they are given, so its text depends on how many tokens are read at once"


@dataclass(frozen=True)
class Finding:
    """What a target does with drafts."""

    trees: bool  # whether it reads them correctly
    chains: bool  # the same. Not tried where trees are read.
    reason: str = ""  # why it reads no trees, or no drafts at all
    tokens: int = 0  # number of tokens of the forwards that it was found with
    depth: int = sys.maxsize  # of the drafts
    length: int = 0  # of the text
    misread: bool = False  # whether it reads less than model and cache promise
    times: int = 1  # number of calls that have found it misread
    until: int = sys.maxsize  # length of text up to which this holds


@dataclass(frozen=True)
class Size:
    """Size of a call's drafts."""

    columns: int  # of a tree of each row, root included
    tokens: int  # of a forward over all rows
    depth: int  # of a tree
    chain: int  # depth of a chain


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
        ragged: whether rows may differ in length, where only trees can be read.
        tries: whether to try what is unknown.
        in_any: whether a flag is set in any process, where all have to run the same forwards.
    """
    target, length = runtime.target, runtime.length + 1
    kinds = map(layer_class, cache_layers(runtime.cache))
    layer = next((each for each in kinds if each.__module__ != "transformers.cache_utils"), None)
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


_MOST_KINDS, _MOST_FINDINGS = 64, 16  # of a target that changes from call to call


def _known(target: Any, kind: Any, length: int, tokens: int, depth: int, doubling: bool) -> Finding | None:
    """The finding for a text of `length` tokens and for drafts of this size; `None` if there is none.

    Args:
        kind: of the call, see `kind_of_call`, and of its drafts.
        doubling: see `known_until`.
    """
    every: Sequence[Finding] = experience_of(target).findings.get(kind, ())
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
    kinds: dict[Any, list[Finding]] = experience_of(target).findings
    while len(kinds) > _MOST_KINDS:
        kinds.pop(next(iter(kinds)), None)
    kept, others = finding, kinds.get(kind, [])
    if finding.misread:
        same = [finding, *(each for each in others if each.misread and each.times == 1)]
        length, tokens = min(each.length for each in same), max(each.tokens for each in same)
        kept = replace(finding, length=length, tokens=tokens, times=len(same))
        others = [each for each in others if each not in same]
    else:
        others = [each for each in others if not _outdated(each, finding)]
    kinds[kind] = [*others, kept][-_MOST_FINDINGS:]
    return replace(finding, until=known_until(target, finding.length, doubling))


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
