"""Drafts from a script: trees with the right continuation down to a random depth, among wrong branches.

With them a target meets all that a trained drafter may do. Some rounds accept nothing and some a whole path, on the
first branch or on a later one. The target's text must not depend on any of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call, Session, WrappedDrafter
from hf_hsdraft.runtime.target_limits import text_config


def random_tree(root: int, truth: Sequence[int], depth: int, vocab_size: int, rng: random.Random) -> DraftTree:
    """Returns a tree of random shape in which a path follows `truth` for a random number of nodes, at most `depth`."""
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
    """Returns the path of a tree that follows `truth` for longest, and then any branch, as a chain."""
    children, node = tree.children(), 0
    path: list[int] = []
    while children[node]:
        token = truth[len(path)] if len(path) < len(truth) else -1
        node = children[node].get(token, next(iter(children[node].values())))
        path.append(node)
    tokens = (tree.tokens[0], *(tree.tokens[n] for n in path))
    size = len(tokens)
    return DraftTree(tokens, tuple(range(-1, size - 1)), tuple(range(size)), tuple(-float(d) for d in range(size)))


class ScriptedDrafter(WrappedDrafter):
    """Drafts along given texts, the new tokens of each row, down to random depths.

    The options, hidden states and checks of `drafter` are used, its drafts are not. `last` is the session of the last
    call; `texts` may be replaced between calls.
    """

    def __init__(self, drafter: Any, texts: Sequence[Sequence[int]], seed: int = 0) -> None:
        super().__init__(drafter)
        self.texts, self._rng = texts, random.Random(seed)
        self.last: ScriptedSession | None = None

    def session(self, call: Call) -> Session:
        self.last = ScriptedSession(call, self.texts, self._rng)
        return self.last


class ScriptedSession(Session):
    """The scripted drafts of one call; `forwards` counts these, `chains` says whether chains were asked for."""

    def __init__(self, call: Call, texts: Sequence[Sequence[int]], rng: random.Random) -> None:
        self._texts, self._rng = texts, rng
        self._vocab_size = text_config(call.target).vocab_size
        self._emitted = [0] * call.rows
        self.forwards, self.chains = 0, False

    @property
    def tokens(self) -> int:
        """Number of tokens emitted by all texts so far."""
        return sum(self._emitted)

    def observe(self, news: Sequence[Accepted]) -> None:
        self.forwards += 1
        for each in news:
            assert len(each.taps) == len(each.positions)
            self._emitted[each.row] += len(each.tokens)

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = []
        for ask in asks:
            truth = list(self._texts[ask.row][self._emitted[ask.row] :])
            tree = random_tree(ask.root, truth, ask.depth, self._vocab_size, self._rng)
            tree = tree.first(ask.size)
            self.chains = self.chains or ask.chain
            trees.append(chain_of(tree, truth) if ask.chain else tree)
        return trees
