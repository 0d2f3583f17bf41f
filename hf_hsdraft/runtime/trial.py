"""Tries whether a target verifies drafts as it reads their paths token by token.

There is no hard-coded list of supported models. After the prompt, on a runtime apart, likely tokens root, p1, p2, p3
are read one at a time: the truth. Then they are read again in two drafts, and the logits are compared.

- The first draft has wrong siblings before the path p1, p2. They are misread if siblings are not hidden from them, or
  if slots are taken for positions. p1 is kept, and all else rejected.
- The second draft continues from p2, and is as wide and as deep as the call's: copies of p3 stand before, below and
  behind it. So p3 and its copies are misread if p1 was not kept rightly, or if some of so many tokens are dropped.

A chain is tried in the same way: part of it is kept, and read on from. In half precision a misreading may be as small
as rounding. So the target shows how large its rounding is: tokens are also read in several columns that do not see each
other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..core.draft_tree import DraftTree
from .misreading import computing_dtype, distances_of, is_full, measured_tolerance, usual_tolerance
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
        return _why_it_failed(error), first_is_right
    right = all(map(truth.explains, (torch.cat(paths), *others)))
    return "" if right else OTHERWISE, first_is_right


@contextlib.contextmanager
def _apart(runtime: TargetRuntime) -> Iterator[TargetRuntime]:
    """A runtime that reads on from the same state, which the cache has again afterwards."""
    outer = runtime.apart()
    mark = outer.slots.mark(before_commit=True)
    try:
        yield outer.apart()
    finally:
        outer.slots.restore(mark)


@dataclass(frozen=True)
class _Truth:
    """Tokens that a target has read one at a time.

    Attributes:
        ids: `[B, length + steps - 1]`, the texts with the tokens, of which the first ends the text.
        tokens: `[B][steps]`.
        logits: `[B, steps, V]`.
        wrong: of each row, other tokens that are likely after the first.
        tolerance: distance of logits that rounding explains.
        spared: one in so many distances may be larger. In half precision a near tie of an expert router may change a
            position; long chains of unlikely text are noisy in full precision too.
    """

    ids: torch.Tensor
    tokens: list[list[int]]
    logits: torch.Tensor
    wrong: list[list[int]]
    tolerance: float
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
    length, noise = input_ids.shape[1], 0.0
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
                tolerance = measured_tolerance(dtype, noise)
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


def _why_it_failed(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"refused by its forward ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
