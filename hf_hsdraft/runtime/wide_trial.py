"""Tries a target on drafts as wide and as deep as its call will make, with a rejection and a commit.

Some targets read a few tokens rightly and many wrongly, or lose what a rejection should give back. After a few tokens
were read rightly (`target_probe`), likely tokens root, p1, p2, ... are read one at a time, and again as two drafts:

- The first has the root, its path but for the last two tokens, and two wrong tokens below; copies of p1 beside the path
  fill it up. Path and copies must have the logits that were read one at a time. The path is kept, all else rejected.
- The second has the last two tokens of the path, and copies of the last one.

Copies show what follows from the number of tokens: experts of limited capacity receive them all. A chain has no room
for copies, so there all tokens of the path are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING
from .module_hooks import has_foreign_hooks
from .target_ability import Ability
from .target_limits import furthest_read, known_until, slots_read_alike
from .target_runtime import TargetRuntime
from .target_steps import OTHERWISE, Steps, read, read_likely, why_it_failed

_LEAST_DEPTH = 3
_HOOKS = "; its forward hooks may do that"


def tried_wide(
    runtime: TargetRuntime, input_ids: torch.Tensor, tried: Steps, found: Ability, ragged: bool = False
) -> Ability:
    """What is left of an ability that was found with few tokens; the cache is as before.

    Args:
        runtime: in the state before the last tokens of the texts `[B, length]` are read.
        tried: the few tokens, whose exactness holds here too.
        ragged: whether rows may differ in length, where only trees can be read.
    """
    if not found.trees and (ragged or not found.chains):
        return found
    depth, columns = _size(runtime)
    if found.trees:
        problem, doubtful = _problem(runtime, input_ids, tried, min(depth, columns - 1), columns, ragged)
    else:
        problem, doubtful = _problem(runtime, input_ids, tried, depth)
    if not problem:
        return found
    hint = _HOOKS if has_foreign_hooks(runtime.target) else ""
    # It reads a few tokens rightly, so it depends on their number: chains are no better.
    reason = f"{columns if found.trees else depth + 1} tokens at once are {problem}{hint}"
    return Ability(False, False, reason, doubtful=doubtful)


def _size(runtime: TargetRuntime) -> tuple[int, int]:
    """Depth, and number of columns of each row: as many as the call's drafts have in all, or as there is room for."""
    target, length, (total, depth) = runtime.target, runtime.length + 1, runtime.drafts
    at = max([length, *(runtime.rows.next_positions or ())])  # the caller's positions may be ahead of the text
    ends = min(furthest_read(target, at), known_until(target, at))
    reach = min(runtime.deepest, ends - at - 2)  # the path is read by single steps beyond the draft's end
    depth = min(max(depth, _LEAST_DEPTH), reach)
    room = min(runtime.slots.left, slots_read_alike(target, runtime.length)) - depth
    return depth, min(total, room)


@dataclass(frozen=True)
class _Draft:
    """A draft of each row, with the nodes of its path and the copies of the path's first token after the root."""

    trees: list[DraftTree]
    path: list[int]
    copies: list[int]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], wrong: int, columns: int) -> _Draft:
        """Paths with `wrong` further tokens below, and copies before and after them, up to `columns`."""
        count = len(paths[0]) + wrong
        spare = max(columns - count, 0)
        first = 1 + spare // 2  # node of the path after the root
        parents = (-1, *[0] * (first - 1), 0, *range(first, first + count - 2), *[0] * (spare - first + 1))
        depths = (0, *[1] * (first - 1), *range(1, count), *[1] * (spare - first + 1))
        trees = []
        for root, *path in paths:
            tokens = (root, *[path[0]] * (first - 1), *path, *[path[0]] * (wrong + spare - first + 1))
            trees.append(DraftTree(tokens, parents, depths, (0.0,) * len(tokens)))
        nodes = [0, *range(first, first + len(paths[0]) - 1)]
        return cls(trees, nodes, [*range(1, first), *range(first + count - 1, count + spare)])


def _problem(
    runtime: TargetRuntime, input_ids: torch.Tensor, tried: Steps, depth: int, columns: int = 0, ragged: bool = False
) -> tuple[str, bool]:
    """How reading likely tokens as trees of so many columns, or as chains if there are none, differs from reading each,
    and whether that is doubtful. Of a tree only the first tokens are compared; the copies show the rest.
    """
    compared = min(depth, TUNING.trial_depth) if columns else depth
    steps = None
    if depth >= _LEAST_DEPTH:
        steps = read_likely(runtime, input_ids, tried.logits[-1], ragged, compared + 1, repeated=not columns)
    if steps is None:
        return "", False
    steps.be_as_exact_as(tried)
    rows, kept = list(zip(*steps.tokens, strict=True)), compared - 1
    try:
        reader = steps.rewind()
        reader.trees = columns > 0 and not reader.prepare_trees()
        for begin, end, wrong in ((0, kept, depth + 1 - kept), (kept, compared + 1, 0)):
            draft = _Draft.of([row[begin:end] for row in rows], wrong, columns)
            logits = read(reader, draft.trees, steps.ids(begin + 1))
            if not _same(steps, draft, logits, torch.stack(steps.logits[begin:end], dim=1)):
                return OTHERWISE, steps.doubtful
            reader.commit([draft.path[1:]] * len(rows))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's code raises, it cannot read this draft
        return why_it_failed(error), False
    finally:
        steps.rewind()
    return "", False


def _same(steps: Steps, draft: _Draft, logits: torch.Tensor, true: torch.Tensor) -> bool:
    """Whether path and copies have the `true` logits `[B, n, V]` of the path. The last copies count separately."""
    half = len(draft.copies) // 2
    parts = (draft.copies[:half], draft.copies[half:], draft.copies[-(half // 2) :] if half > 1 else [])
    copies = all(steps.same(logits[:, part], true[:, 1:2].expand(-1, len(part), -1)) for part in parts if part)
    return copies and steps.same(logits[:, draft.path], true)
