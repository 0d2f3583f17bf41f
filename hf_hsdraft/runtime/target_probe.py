"""Finds out by trying whether a target reads a draft at once as it reads its paths token by token.

There is no hard-coded list of supported models. A few tokens that the target has read one at a time (`Steps`) are read
again as a draft, and compared. A call of one text uses its first tokens, which it reads one at a time anyway. Other
calls read likely tokens, and roll them back.

The tokens are root, a, c, d. As a tree they are in the order root, b, a, c: a and b follow the root, c follows a. So a
and c are misread if b is not hidden from them, or if slots are taken for positions; and keeping their path moves both.
d is read after the path is kept. As a chain they are root, a, c, and then d.

In half precision a misreading may be as small as rounding. The target itself shows how large rounding is: it reads the
tokens a second time, in several columns that do not see each other (`_noise`). It also reads the same tree as faulty
targets would, and must be nearer to the truth than they are; see `misreading.heeded`. The precision is determined from
the logits, since a model may return float32 that it computed in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING
from .misreading import heeded, is_full
from .module_hooks import has_foreign_hooks
from .target_ability import Ability, remembered
from .target_runtime import TargetRuntime
from .target_steps import OTHERWISE, STEPS, Steps, likely, read, read_likely, read_one, why_it_failed
from .wide_trial import tried_wide

_PARENTS, _DEPTHS = (-1, 0, 0, 2), (0, 1, 1, 2)  # of root, b, a, c
_PATH = [0, 2, 3]
PROBE_DEPTH = 3
PROBE_COLUMNS = len(_PARENTS)
_ROWS = 2  # of a batch that are tried: more only take longer
_ROUNDED = "its products round what they are given, so its text depends on how many tokens are read at once"
_HOOKS = "; its forward hooks may do that"
_TOO_FEW = "its vocabulary is too small for a tree"


def presumed_ability(runtime: TargetRuntime) -> Ability:
    """A target's ability as far as model and cache tell, until it has been tried."""
    reason = runtime.prepare_trees()
    return Ability(not reason, True, reason, until=runtime.length)


def ability_by(steps: Steps, chains: bool = False) -> Ability:
    """Tries the target of a one-text call on the tokens that it has read one at a time; `chains` as in `tried_ability`.

    Afterwards the cache holds these tokens as before, read as a draft if drafts are read correctly.
    """
    runtime, found, tried = steps.runtime, None, steps
    try:
        if steps.telling:
            found = _tried(steps, steps.logits[0], False, chains, True)
        if found is None or found.unclear:
            steps.rewind()
            others = read_likely(runtime, steps.input_ids, steps.logits[0])
            if others is not None:
                found, tried = _tried(others, steps.logits[0], False, chains), others
                others.rewind()
            steps.read_all()
        elif not (found.trees or found.chains):
            steps.read_all()
        found = found or Ability(False, True, _TOO_FEW)
        after = runtime.apart()
        after.rows, after.unread = runtime.rows.keeping([STEPS]), 0
        root = steps.logits[-1].argmax(dim=-1, keepdim=True).to(steps.input_ids)
        found = tried_wide(after, torch.cat([steps.ids(STEPS), root], dim=1), tried, found)
    except BaseException:
        steps.rewind()
        raise
    return remembered(found, runtime, steps.length, chains=chains)


def tried_ability(
    runtime: TargetRuntime,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    ragged: bool = False,
    doubling: bool = True,
    chains: bool = False,
) -> Ability:
    """Tries the target of a call on likely tokens, and rolls them back; see `read_likely`.

    Args:
        ragged: whether rows may differ in length, where only trees can be read.
        doubling: see `known_until`.
        chains: whether no trees will be drafted in any case.
    """
    runtime, rows = _of_few_rows(runtime)
    length = runtime.length + 1
    steps, found = read_likely(runtime, input_ids[rows], logits[rows], ragged), Ability(False, True, _TOO_FEW)
    if steps is not None:
        try:
            found = _tried(steps, logits[rows], ragged, chains)
        finally:
            steps.rewind()
        if doubling:  # its number of forwards follows from the texts, and synced processes must run equally many
            found = tried_wide(runtime, input_ids[rows], steps, found, ragged)
    return remembered(found, runtime, length, doubling, chains, ragged)


def tried_again(runtime: TargetRuntime, input_ids: torch.Tensor, ragged: bool, chains: bool = False) -> Ability:
    """As `tried_ability`, in the middle of a call; reads the last tokens of the texts `[B, length]` to find likely
    ones.

    Rows of different lengths can continue only as trees, whatever this finds: their cache has slots that other rows
    filled, which only a mask per row hides. If trees are no longer read correctly, each row continues with a tree of
    one node. That is a forward of one token per row under a mask of its kept slots, as in plain decoding; what a trial
    finds misread is several tokens at once. Nothing is drafted then, and nothing tried again.
    """
    runtime, rows = _of_few_rows(runtime)
    input_ids = input_ids[rows]
    steps = Steps.begin(runtime, input_ids)
    reader = steps.runtime.apart()
    reader.trees = ragged
    try:
        logits = read_one(reader, input_ids[:, -1].tolist(), input_ids)
    finally:
        apart = steps.rewind()
    return tried_ability(apart, input_ids, logits, ragged, chains=chains)


def _of_few_rows(runtime: TargetRuntime) -> tuple[TargetRuntime, list[int]]:
    """A runtime of the shortest and the longest text, which show as much as all do, and their places; or of all."""
    rows = list(range(len(runtime.rows.kept)))
    if len(rows) <= _ROWS or not runtime.rows_can_be_apart:
        return runtime, rows
    lengths = runtime.rows.lengths
    first, *_, last = sorted(rows, key=lambda row: lengths[row])
    return runtime.apart_of([first, last]), [first, last]


def _tried(steps: Steps, logits: torch.Tensor, ragged: bool, chains: bool, strict: bool = False) -> Ability:
    """A target's ability by a draft of tokens that it has read one at a time: a tree, or else a chain.

    Next to some tokens a misreading may be as small as rounding; others are tried until the result is clear.

    Args:
        logits: `[B, V]`, whose most likely tokens become siblings.
        strict: for text that the target writes, which tests positions less; if it is unclear whether these are heeded,
            other tokens will be tried.
    """
    paths = steps.paths
    if steps.tolerance == 0:  # it reads the steps itself, so it comes first
        return Ability(False, False, _ROUNDED)
    reason, unclear = "" if chains else steps.runtime.prepare_trees(), False
    if not reason and not chains:
        attempts = 1 if strict else TUNING.trial_attempts
        siblings = [likely(row, set(path), attempts) for row, path in zip(logits, paths, strict=True)]
        reason = _TOO_FEW
        for beside in zip(*siblings, strict=True):
            problem = _problem_of_trees(steps, beside, strict)
            unclear, reason = problem is None, f"the branches of a tree are {problem}" if problem else ""
            if not unclear:
                break
        if unclear:
            reason = f"what its masks change drowns in the rounding of {steps.dtype}"
        if not reason or (unclear and strict):
            return Ability(not reason, True, reason, unclear, steps.doubtful)
    # Ragged rows have no chains: there a tree is read even where it has one path.
    steps.runtime.trees = ragged
    drafts = [DraftTree(path, (-1, 0, 1), (0, 1, 2), (0.0,) * 3) for path in paths]
    problem = _problem(steps, drafts, [0, 1, 2], [[0, 1], [1], [2]])
    if problem:
        hint = _HOOKS if has_foreign_hooks(steps.runtime.target) else ""
        return Ability(False, False, f"several tokens at once are {problem}{hint}", doubtful=steps.doubtful)
    return Ability(False, True, reason, unclear, steps.doubtful)


def _problem_of_trees(steps: Steps, beside: Sequence[int], strict: bool) -> str | None:
    """As `_problem`, for trees with a sibling b in each row; `None` if rounding hides the result."""
    steps.runtime.trees = True
    rows = zip(beside, steps.paths, strict=True)
    trees = [DraftTree((root, b, a, c), _PARENTS, _DEPTHS, (0.0,) * PROBE_COLUMNS) for b, (root, a, c) in rows]
    misread: list[torch.Tensor] = []
    if not is_full(steps.dtype):
        # The same forward simulates targets that ignore masks, or positions.
        line = tuple(range(-1, PROBE_COLUMNS - 1))
        in_line = [replace(tree, parents=line) for tree in trees]
        by_slot = [replace(tree, depths=tuple(range(PROBE_COLUMNS))) for tree in trees]
        try:
            misread = [read(steps.rewind(), kind, steps.input_ids) for kind in (in_line, by_slot)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return why_it_failed(error)
    # In half precision each group decides separately: a target that ignores masks misreads a and c only.
    return _problem(steps, trees, _PATH, [[0, 1], [1], [2]], misread, strict)


def _problem(
    steps: Steps,
    drafts: list[DraftTree],
    path: list[int],
    groups: Sequence[list[int]],
    misread: Sequence[torch.Tensor] = (),
    strict: bool = False,
) -> str | None:
    """How reading the steps at once differs from reading them one at a time; empty if it does not, `None` if unclear.

    The draft is read and its path kept, then the last token is read; the cache is left so.

    Args:
        path: nodes of the first steps, root included.
        groups: steps that are compared together.
        misread: logits of the nodes as faulty targets would read them: ignoring masks, and ignoring positions.
    """
    try:
        runtime = steps.rewind()
        logits = read(runtime, drafts, steps.input_ids)
        runtime.commit([path[1:]] * len(drafts))
        further = read_one(runtime, steps.tokens[-1], steps.ids(STEPS))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's code raises, it cannot read this draft
        return why_it_failed(error)
    true, seen = torch.stack(steps.logits, dim=1), torch.cat([logits[:, path], further[:, None]], dim=1)
    if not all(steps.same(seen[:, group], true[:, group]) for group in (*groups, [STEPS - 1])):
        return OTHERWISE
    if not misread:
        return ""
    # Not every model has positions.
    faults = [each[:, path[1:]] for each in misread]
    right = heeded(seen[:, 1:3], true[:, 1:3], faults, all_faults=strict, tolerance=steps.tolerance)
    return None if right is None else "" if right else OTHERWISE
