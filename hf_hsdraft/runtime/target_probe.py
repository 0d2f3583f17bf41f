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

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING
from .cache_slots import Mark
from .misreading import (
    computing_dtype,
    distances_of,
    foreign_modules,
    heeded,
    in_tolerances,
    is_full,
    measured_tolerance,
    rounds_inputs,
    usual_tolerance,
)
from .module_hooks import has_foreign_hooks
from .target_ability import Ability, remembered
from .target_limits import furthest_read
from .target_runtime import TargetRuntime
from .tree_reading import commit_trees, read_trees

_PARENTS, _DEPTHS = (-1, 0, 0, 2), (0, 1, 1, 2)  # of root, b, a, c
_PATH = [0, 2, 3]
STEPS = 4
PROBE_DEPTH = 3
PROBE_COLUMNS = len(_PARENTS)
_NOISE_COLUMNS = 9  # as many as drafts have: some kernels change with the number of rows
_ROWS = 2  # of a batch that are tried: more only take longer
_ROUNDED = "its products round what they are given, so its text depends on how many tokens are read at once"
_HOOKS = "; its forward hooks may do that"
_OTHERWISE, _TOO_FEW = "read otherwise than one by one", "its vocabulary is too small for a tree"


@dataclass
class Steps:
    """Tokens that a target has read one at a time, with its logits: the truth about a draft of them.

    Attributes:
        runtime: a runtime apart, in the state before them.
        start: state of the cache before them.
        input_ids: `[B, length]`, the texts up to and with the first of them, the root.
        tokens, logits: by step, of all rows; logits are `[B, V]`.
        doubtful: whether a comparison came near its threshold.
    """

    runtime: TargetRuntime
    start: Mark
    input_ids: torch.Tensor
    tokens: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    doubtful: bool = False

    @classmethod
    def begin(cls, runtime: TargetRuntime, input_ids: torch.Tensor) -> Steps:
        """Before the last tokens of texts `[B, length]` are read: `add` takes these and later ones."""
        apart = runtime.apart()
        return cls(apart, apart.slots.mark(before_commit=True), input_ids)

    def add(self, tokens: list[int], logits: torch.Tensor) -> None:
        self.tokens.append(tokens)
        self.logits.append(logits)

    @property
    def complete(self) -> bool:
        return len(self.tokens) == STEPS

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Root, a and c of each row."""
        return list(zip(*self.tokens[:-1], strict=True))

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return computing_dtype(self.logits[0], self.runtime.target.dtype)

    @functools.cached_property
    def tolerance(self) -> float:
        """The distance of logits that rounding explains; in half precision measured on these very tokens.

        0 for a target of full precision whose products round their inputs: there no distance is small enough.
        """
        runtime, usual, full = self.runtime, usual_tolerance(self.dtype), is_full(self.dtype)
        reach = furthest_read(runtime.target, self.length) - self.length
        fits = min(runtime.deepest, reach) >= STEPS + _NOISE_COLUMNS
        foreign = any(foreign_modules(runtime.target))
        if full and foreign and torch.get_float32_matmul_precision() == "highest" and rounds_inputs(runtime.target):
            return 0.0
        if (full and not foreign) or not fits or runtime.prepare_trees():
            return usual
        try:
            if full:
                return usual if _distance_of_many(self) <= usual else 0.0
            return measured_tolerance(self.dtype, _noise(self))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a forward that rejects columns will reject drafts
            return usual

    def same(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        ratio = in_tolerances(logits, expected, self.dtype, self.tolerance)
        self.doubtful |= 1 / TUNING.doubtful < ratio < TUNING.doubtful
        return ratio <= 1

    @property
    def telling(self) -> bool:
        """Whether all tokens of each path differ: repeated tokens could stand for each other."""
        return all(len(set(path)) == len(path) for path in self.paths)

    @property
    def length(self) -> int:
        return self.start.slots + 1

    def ids(self, count: int) -> torch.Tensor:
        """The texts with the first `count` of the tokens."""
        further = [self.input_ids.new_tensor(tokens)[:, None] for tokens in self.tokens[1:count]]
        return torch.cat([self.input_ids, *further], dim=1)

    def rewind(self) -> TargetRuntime:
        """Restores the cache from before the tokens; returns a runtime to read them with."""
        self.runtime.slots.restore(self.start)
        self.start = self.runtime.slots.mark(before_commit=True)
        return self.runtime.apart()

    def read_all(self) -> None:
        """Reads the tokens one at a time again, for good."""
        runtime = self.rewind()
        for index, tokens in enumerate(self.tokens, 1):
            _read_one(runtime, tokens, self.ids(index))


def presumed_ability(runtime: TargetRuntime) -> Ability:
    """A target's ability as far as model and cache tell, until it has been tried."""
    reason = runtime.prepare_trees()
    return Ability(not reason, True, reason, until=runtime.length)


def ability_by(steps: Steps, chains: bool = False) -> Ability:
    """Tries the target of a one-text call on the tokens that it has read one at a time; `chains` as in `tried_ability`.

    Afterwards the cache holds these tokens as before, read as a draft if drafts are read correctly.
    """
    runtime, found = steps.runtime, None
    try:
        if steps.telling:
            found = _tried(steps, steps.logits[0], False, chains, True)
        if found is None or found.unclear:
            steps.rewind()
            others = read_likely(runtime, steps.input_ids, steps.logits[0])
            if others is not None:
                found = _tried(others, steps.logits[0], False, chains)
                others.rewind()
            steps.read_all()
        elif not (found.trees or found.chains):
            steps.read_all()
    except BaseException:
        steps.rewind()
        raise
    return remembered(found or Ability(False, True, _TOO_FEW), runtime, steps.length, chains=chains)


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
        logits = _read_one(reader, input_ids[:, -1].tolist(), input_ids)
    finally:
        apart = steps.rewind()
    return tried_ability(apart, input_ids, logits, ragged, chains=chains)


def read_likely(
    runtime: TargetRuntime, input_ids: torch.Tensor, logits: torch.Tensor, ragged: bool = False
) -> Steps | None:
    """Reads likely tokens after texts, one at a time; `None` if there are too few.

    Args:
        input_ids: `[B, length]`, the texts with their last token, which the target has not read yet.
        logits: `[B, V]`, whose most likely tokens are read; the logits that chose the last token will do.
    """
    roots = input_ids[:, -1].tolist()
    # Likely tokens are ordinary text, not image markers or the like.
    likely = [_likely(row, {root}, STEPS - 1) for row, root in zip(logits, roots, strict=True)]
    if min(map(len, likely)) < STEPS - 1:
        return None
    steps = Steps.begin(runtime, input_ids)
    reader = steps.runtime.apart()
    reader.trees = ragged
    try:
        for tokens in [roots, *map(list, zip(*likely, strict=True))]:
            steps.tokens.append(tokens)
            steps.logits.append(_read_one(reader, tokens, steps.ids(len(steps.tokens))))
    except BaseException:
        steps.rewind()
        raise
    return steps


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
        likely = [_likely(row, set(path), attempts) for row, path in zip(logits, paths, strict=True)]
        reason = _TOO_FEW
        for beside in zip(*likely, strict=True):
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


def _likely(logits: torch.Tensor, without: set[int], count: int) -> list[int]:
    """The most likely tokens by logits `[V]`, without some; fewer than `count` if there are no more."""
    most = logits.topk(min(count + len(without), len(logits))).indices.tolist()
    return [token for token in most if token not in without][:count]


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
            misread = [_read(steps.rewind(), kind, steps.input_ids) for kind in (in_line, by_slot)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return _refusal(error)
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
        logits = _read(runtime, drafts, steps.input_ids)
        runtime.commit([path[1:]] * len(drafts))
        further = _read_one(runtime, steps.tokens[-1], steps.ids(STEPS))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's code raises, it cannot read this draft
        return _refusal(error)
    true, seen = torch.stack(steps.logits, dim=1), torch.cat([logits[:, path], further[:, None]], dim=1)
    if not all(steps.same(seen[:, group], true[:, group]) for group in (*groups, [STEPS - 1])):
        return _OTHERWISE
    if not misread:
        return ""
    # Not every model has positions.
    faults = [each[:, path[1:]] for each in misread]
    right = heeded(seen[:, 1:3], true[:, 1:3], faults, all_faults=strict, tolerance=steps.tolerance)
    return None if right is None else "" if right else _OTHERWISE


def _noise(steps: Steps) -> float:
    """The maximum distance between logits of the tokens alone, and in one of several columns that see only themselves.

    Both the first and the last column must equal the token read alone, up to rounding. A target that misreads several
    tokens at once may change one of the two, the first or the last. So the smaller distance is the rounding, and its
    column is kept.
    """
    runtime, noise = steps.rewind(), 0.0
    for tokens, alone in zip(steps.tokens, steps.logits, strict=True):
        roots = [DraftTree.root(token) for token in tokens]
        logits = read_trees(runtime, roots, _NOISE_COLUMNS, runtime.kinds).logits[:, -_NOISE_COLUMNS:]
        first, last = (float(distances_of(logits[:, column], alone).max()) for column in (0, -1))
        commit_trees(runtime, [[]] * len(roots), _NOISE_COLUMNS if first < last else 1)
        noise = max(noise, min(first, last))
    return noise


def _distance_of_many(steps: Steps) -> float:
    """The maximum distance between reading as many tokens as drafts have at once, and one at a time.

    Products that round their inputs show it there, while a few tokens may be read alike by chance.
    """
    runtime, ids = steps.rewind(), steps.input_ids
    roots = ids[:, -1].tolist()
    likely = [
        [root, *_likely(row, {root}, _NOISE_COLUMNS - 1)] for root, row in zip(roots, steps.logits[0], strict=True)
    ]
    runtime.trees = True
    alone: list[torch.Tensor] = []
    for tokens in zip(*likely, strict=True):
        ids = torch.cat([ids, ids.new_tensor(tokens)[:, None]], dim=1) if alone else ids
        alone.append(_read_one(runtime, tokens, ids))
    count = len(alone)
    chains = [DraftTree(tuple(row), tuple(range(-1, count - 1)), tuple(range(count)), (0.0,) * count) for row in likely]
    runtime = steps.rewind()
    runtime.trees = True
    return float(distances_of(_read(runtime, chains, steps.input_ids), torch.stack(alone, dim=1)).max())


def _read(runtime: TargetRuntime, trees: list[DraftTree], input_ids: torch.Tensor) -> torch.Tensor:
    return runtime.verify(trees, input_ids).logits[:, : len(trees[0])]


def _read_one(runtime: TargetRuntime, tokens: Sequence[int], input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, V]` of a token of each row, which stays read."""
    roots = [DraftTree.root(token) for token in tokens]
    logits = _read(runtime, roots, input_ids)[:, 0]
    runtime.commit([[]] * len(roots))
    return logits


def _refusal(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"refused by its forward ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
