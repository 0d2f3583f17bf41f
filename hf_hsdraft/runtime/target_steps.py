"""Tokens that a target reads one at a time: the truth about drafts of them, and how exact it is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.draft_tree import DraftTree
from ..core.tuning import TUNING
from .cache_slots import Mark
from .misreading import (
    computing_dtype,
    distances_of,
    foreign_modules,
    in_tolerances,
    is_full,
    measured_tolerance,
    rounds_inputs,
    usual_tolerance,
)
from .target_limits import furthest_read
from .target_runtime import TargetRuntime
from .tree_reading import commit_trees, read_trees

STEPS = 4
OTHERWISE = "read otherwise than one by one"
_NOISE_COLUMNS = 9  # as many as drafts have: some kernels change with the number of rows


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

    def be_as_exact_as(self, other: Steps) -> None:
        """Takes over dtype and tolerance; in half precision at least the usual one, as less likely text is noisier."""
        self.dtype, usual = other.dtype, usual_tolerance(other.dtype)
        self.tolerance = max(vars(other).get("tolerance", usual), 0.0 if is_full(other.dtype) else usual) or usual

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
            read_one(runtime, tokens, self.ids(index))


def read_likely(
    runtime: TargetRuntime,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    ragged: bool = False,
    count: int = STEPS,
    repeated: bool = False,
) -> Steps | None:
    """Reads likely tokens after texts, one at a time; `None` if there are too few.

    Args:
        input_ids: `[B, length]`, the texts with their last token, which the target has not read yet.
        logits: `[B, V]`, whose most likely tokens are read; the logits that chose the last token will do.
        count: number of tokens, the last one of the texts included.
        repeated: whether the same token is read again and again.
    """
    roots = input_ids[:, -1].tolist()
    # Likely tokens are ordinary text, not image markers or the like.
    most = [likely(row, {root}, 1 if repeated else count - 1) for row, root in zip(logits, roots, strict=True)]
    most = [tokens * (count - 1 if repeated else 1) for tokens in most]
    if min(map(len, most)) < count - 1:
        return None
    steps = Steps.begin(runtime, input_ids)
    reader = steps.runtime.apart()
    reader.trees = ragged
    try:
        for tokens in [roots, *map(list, zip(*most, strict=True))]:
            steps.tokens.append(tokens)
            steps.logits.append(read_one(reader, tokens, steps.ids(len(steps.tokens))))
    except BaseException:
        steps.rewind()
        raise
    return steps


def likely(logits: torch.Tensor, without: set[int], count: int) -> list[int]:
    """The most likely tokens by logits `[V]`, without some; fewer than `count` if there are no more."""
    most = logits.topk(min(count + len(without), len(logits))).indices.tolist()
    return [token for token in most if token not in without][:count]


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
    texts = [[root, *likely(row, {root}, _NOISE_COLUMNS - 1)] for root, row in zip(roots, steps.logits[0], strict=True)]
    runtime.trees = True
    alone: list[torch.Tensor] = []
    for tokens in zip(*texts, strict=True):
        ids = torch.cat([ids, ids.new_tensor(tokens)[:, None]], dim=1) if alone else ids
        alone.append(read_one(runtime, tokens, ids))
    count = len(alone)
    chains = [DraftTree(tuple(row), tuple(range(-1, count - 1)), tuple(range(count)), (0.0,) * count) for row in texts]
    runtime = steps.rewind()
    runtime.trees = True
    return float(distances_of(read(runtime, chains, steps.input_ids), torch.stack(alone, dim=1)).max())


def read(runtime: TargetRuntime, trees: list[DraftTree], input_ids: torch.Tensor) -> torch.Tensor:
    return runtime.verify(trees, input_ids).logits[:, : len(trees[0])]


def read_one(runtime: TargetRuntime, tokens: Sequence[int], input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, V]` of a token of each row, which stays read."""
    roots = [DraftTree.root(token) for token in tokens]
    logits = read(runtime, roots, input_ids)[:, 0]
    runtime.commit([[]] * len(roots))
    return logits


def why_it_failed(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"refused by its forward ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
