"""Drafting from a script: trees that hold the right continuation to a random depth, among wrong branches.

What a trained drafter does to a target, without one: some rounds accept nothing, some a whole path, on first and later
branches. For checks of targets, whose text must not depend on any of it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..drafters.hidden_state.candidate_generator import HSCandidateGenerator
from ..engine import decoding
from ..trees.draft_tree import DraftTree


def random_tree(root: int, truth: Sequence[int], depth: int, vocab_size: int, rng: random.Random) -> DraftTree:
    """A tree of random shape whose best path follows `truth` for a random number of nodes, at most `depth`."""
    nodes: list[tuple[int, int, int]] = [(root, -1, 0)]
    taken: set[tuple[int, int]] = set()

    def add(token: int, parent: int) -> int:
        if (parent, token) in taken:
            return next(i for i, node in enumerate(nodes) if node[:2] == (token, parent))
        taken.add((parent, token))
        nodes.append((token, parent, nodes[parent][2] + 1))
        return len(nodes) - 1

    right = rng.randint(0, min(depth, len(truth)))
    tip = 0
    for step in range(right):
        for _ in range(rng.randint(0, 2)):
            add(rng.randrange(vocab_size), tip)
        tip = add(truth[step], tip)
    for _ in range(rng.randint(0, 6)):
        parent = rng.randrange(len(nodes))
        if nodes[parent][2] < depth:
            add(rng.randrange(vocab_size), parent)
    tokens, parents, depths = zip(*nodes, strict=True)
    return DraftTree(tokens, parents, depths, tuple(-float(d) for d in depths))


def chain_of(tree: DraftTree, truth: Sequence[int]) -> DraftTree:
    """The path of a tree that follows `truth` longest, then any."""
    children, node = tree.children(), 0
    path: list[int] = []
    while children[node]:
        token = truth[len(path)] if len(path) < len(truth) else -1
        node = children[node].get(token, next(iter(children[node].values())))
        path.append(node)
    tokens = (tree.tokens[0], *(tree.tokens[n] for n in path))
    size = len(tokens)
    return DraftTree(tokens, tuple(range(-1, size - 1)), tuple(range(size)), tuple(-float(d) for d in range(size)))


@contextmanager
def scripted(texts: Sequence[Sequence[int]], seed: int = 0) -> Iterator[None]:
    """Within, all drafts of this process follow `texts`, the new tokens of each row, as far as chance has it.

    For the time being no other thread should decode.
    """
    rng = random.Random(seed)

    class Scripted(HSCandidateGenerator):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._emitted = [0] * len(self._rows)

        def read(
            self,
            taps: torch.Tensor,
            next_tokens: torch.Tensor,
            position_ids: torch.Tensor,
            row: int = 0,
            embeds: torch.Tensor | None = None,
        ) -> None:
            assert len(taps) == len(position_ids)
            self._rows[row].root = int(next_tokens[-1])
            self._emitted[row] += len(next_tokens) if self._emitted[row] else 1

        def draft(
            self, max_depths: Mapping[int, int] | None = None, behind: Collection[int] | None = None
        ) -> list[DraftTree]:
            trees = []
            for row, limit in (max_depths or {}).items():
                truth = list(texts[row][self._emitted[row] :])
                size = self.drafter.config.vocab_size
                tree = random_tree(self._rows[row].root, truth, min(limit, self.options.depth), size, rng)
                tree = tree.first(self._of_a_call.tree_size)
                trees.append(tree if self.options.beam_width > 1 else chain_of(tree, truth))
            return trees

    before = decoding.HSCandidateGenerator
    decoding.HSCandidateGenerator = Scripted  # type: ignore[misc]
    try:
        yield
    finally:
        decoding.HSCandidateGenerator = before  # type: ignore[misc]
