"""Draft trees as plain data, and the functions that grow them: from a drafter's probabilities, or from look-ups."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .methods import Registry
from .tensors import on_device

NGRAM_LEAST = 1e-3  # least probability of a path that gets a node - by hand


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a text, as a tree of tokens.

    Node 0 is the root: the last accepted token, which the target has not read yet. Parents stand before their children.
    Children of one node carry different tokens, so each node is a distinct continuation.

    Attributes:
        tokens: token ids.
        parents: index of each node's parent; -1 for the root.
        depths: distance from the root. A node's position in the text is the root's position plus this.
        scores: the drafter's log-probability of each node's whole path; 0 for the root. Never above the parent's.
        log_probs: for each node the log-probabilities `[V']` from which its children were drawn in order, without
            replacement; `None` for a node without children. Empty where nodes were not drawn.
        vocab_ids: `[V']`, int64, the token id of each column of `log_probs`; `None` where nodes were not drawn.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]
    log_probs: tuple[torch.Tensor | None, ...] = ()
    vocab_ids: torch.Tensor | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """Returns the tree that drafts nothing."""
        return cls((token,), (-1,), (0,), (0.0,))

    @classmethod
    def idle(cls, token: int) -> DraftTree:
        """Returns what the target reads for a finished text: the position before its last token."""
        return cls((token,), (-1,), (-1,), (0.0,))

    def fault(self, vocab_size: int = 0) -> str:
        """Returns which rule of draft trees is broken, or ""; `vocab_size` limits drafted ids, unless it is 0."""
        count, seen = len(self.tokens), set()
        if not count or {len(self.parents), len(self.depths), len(self.scores)} != {count}:
            return (
                f"{count} tokens have {len(self.parents)} parents, {len(self.depths)} depths, {len(self.scores)} scores"
            )
        if (self.parents[0], self.depths[0], self.scores[0]) != (-1, 0, 0.0):
            found = f"parent {self.parents[0]}, depth {self.depths[0]} and score {self.scores[0]}"
            return f"the root has {found}: expected -1, 0 and 0.0"
        for node in range(1, count):
            token, parent, depth = self.tokens[node], self.parents[node], self.depths[node]
            if not 0 <= parent < node:
                return f"node {node} has parent {parent}: expected a node before it, 0 to {node - 1}"
            if depth != self.depths[parent] + 1:
                return f"node {node} has depth {depth}, its parent {self.depths[parent]}: expected one more"
            if not self.scores[node] <= self.scores[parent]:  # also rejects NaN
                found = f"score {self.scores[node]}, its parent {self.scores[parent]}"
                return f"node {node} has {found}: expected the log-probability of the whole path, which is no greater"
            if token < 0 or 0 < vocab_size <= token:
                return f"node {node} has token {token}: the target's vocabulary has {vocab_size}"
            if (parent, token) in seen:
                return f"node {node} has token {token}, as a node before it has with the same parent {parent}"
            seen.add((parent, token))
        return ""

    def children(self) -> list[dict[int, int]]:
        """Returns for each node a mapping from its children's token ids to their indices."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]][self.tokens[node]] = node
        return children

    def path(self, node: int) -> list[int]:
        """Returns the node indices from the root's child down to `node`; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def expected_length(self) -> float:
        """Returns the mean number of accepted draft tokens, if the scores are right."""
        return sum(math.exp(score) for score in self.scores[1:])

    def first(self, size: int) -> DraftTree:
        """Returns the tree of the root and its `size` most probable nodes; ties keep the earlier node."""
        if size >= len(self) - 1:
            return self
        ranked = sorted(range(1, len(self)), key=lambda node: -self.scores[node])
        return self.part({0, *ranked[:size]})

    def part(self, kept: set[int]) -> DraftTree:
        """Returns the subtree of `kept` nodes, each with its parent; without `log_probs`, as it is no draw."""
        nodes = sorted(kept)
        place = {old: new for new, old in enumerate(nodes)}
        return from_nodes(
            [(self.tokens[n], place[self.parents[n]] if n else -1, self.depths[n], self.scores[n]) for n in nodes]
        )

    def ancestor_mask(self) -> list[list[bool]]:
        """Returns `[nodes][nodes]`, True where the row's node may see the column's: its ancestors and itself."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            rows.append([False] * len(self) if parent < 0 else rows[parent].copy())
            rows[node][node] = True
        return rows


@dataclass(frozen=True)
class TreeBatch:
    """Trees of a batch as one forward reads them. Shorter ones are padded with copies of the root that none sees."""

    tokens: torch.Tensor  # `[B, N]`, int64
    depths: torch.Tensor  # `[B, N]`, int64
    ancestors: torch.Tensor  # `[B, N, N]`, bool, True where the row's node may see the column's

    @classmethod
    def of(cls, trees: Sequence[DraftTree], device: torch.device, size: int = 0) -> TreeBatch:
        """Returns the batch with columns for at least `size` nodes."""
        size = max(size, *map(len, trees))
        tokens, depths, ancestors = [], [], []
        for tree in trees:
            spare = size - len(tree)
            tokens.append([*tree.tokens, *[tree.tokens[0]] * spare])
            depths.append([*tree.depths, *[tree.depths[0]] * spare])
            alone = ([column == node for column in range(size)] for node in range(len(tree), size))
            ancestors.append([*(row + [False] * spare for row in tree.ancestor_mask()), *alone])
        return cls(on_device(tokens, device), on_device(depths, device), on_device(ancestors, device, dtype=torch.bool))


def certainty(trees: Sequence[DraftTree]) -> float:
    """Returns the mean probability that a text's next token is in its tree; 0 for no trees."""
    firsts = [[math.exp(s) for s, depth in zip(tree.scores, tree.depths, strict=True) if depth == 1] for tree in trees]
    return math.fsum(min(sum(probabilities), 1.0) for probabilities in firsts) / max(len(trees), 1)


def merge_trees(first: DraftTree, second: DraftTree, tree_size: int) -> DraftTree:
    """Returns the union of two trees with the same root, cut to its `tree_size` most probable nodes.

    A node in both trees keeps the greater of its two probabilities given its parent. The scores below it rise with it,
    so no child outranks its parent. Raises a ValueError if the roots differ.
    """
    if first.tokens[0] != second.tokens[0]:
        raise ValueError(f"trees with different roots cannot be merged: {first.tokens[0]} and {second.tokens[0]}")
    tokens, parents, depths = [first.tokens[0]], [-1], [0]
    steps = [0.0]  # log-probability of each node after its parent
    places: dict[tuple[int, int], int] = {}  # index of each node, by its parent's index and its token
    for tree in (first, second):
        merged = [0] * len(tree)  # index of each node of this tree in the union
        for node in range(1, len(tree)):
            parent, token = merged[tree.parents[node]], tree.tokens[node]
            step = tree.scores[node] - tree.scores[tree.parents[node]]
            place = merged[node] = places.setdefault((parent, token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(parent)
                depths.append(tree.depths[node])
                steps.append(step)
            steps[place] = max(steps[place], step)
    scores = [0.0]
    for parent, step in zip(parents[1:], steps[1:], strict=True):
        scores.append(scores[parent] + step)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(scores)).first(tree_size)


def from_nodes(nodes: Sequence[tuple[int, int, int, float]]) -> DraftTree:
    """Makes a tree from token, parent, depth and score of each node."""
    tokens, parents, depths, scores = zip(*nodes, strict=True)
    return DraftTree(tokens, parents, depths, scores)


class Expansion:
    """What a drafter says about the children of nodes.

    `depth` is the greatest depth of a child. If `has_states` is False, as for a drafter that drafts all depths in one
    forward, states are `None`.
    """

    depth: int
    has_states: bool = True

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the log-probabilities `[B, n, V']` of all children, and the nodes' states `[B, n, S]` or `None`.

        Log-probabilities that are the same for all nodes of a level may be `[B, 1, V']`.

        Args:
            level: depth of the children, 1 or more.
            tokens: `[B, n]`, int64, tokens of the nodes.
            states: `[B, n, S]`, states of the nodes' parents; `None` at level 1, where the node is the root.
        """
        raise NotImplementedError

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the `count` most probable children of all nodes, the best first; `scores` `[B, n]` are the nodes'.

        A drafter may override this with a faster search than over all children.

        Returns:
            The children's scores `[B, k]`, the children as columns `[B, k]` of the log-probabilities, their parents
            `[B, k]` as columns of `tokens`, and the nodes' states `[B, n, S]` or `None`.
        """
        log_probs, states = self(level, tokens, states)
        return *best_children(log_probs, scores, count), states

    def search(self, root_tokens: torch.Tensor, limits: TreeLimits) -> tuple[torch.Tensor, list[int]] | None:
        """As `searched`, where a drafter has a faster way; otherwise `None`."""
        return None


def best_children(
    log_probs: torch.Tensor, scores: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns scores, columns and parents `[B, k]` of the best children, see `Expansion.best`."""
    totals = scores[..., None] + log_probs
    values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
    return values, places % totals.shape[-1], places // totals.shape[-1]


@dataclass(frozen=True)
class TreeLimits:
    """How large trees may be."""

    tree_size: int  # most nodes besides the root
    beam_width: int  # nodes expanded at each depth; 1 gives a chain
    threshold: float  # least probability of a path, 0 to 1; ignored by builders that draw
    max_depths: Sequence[int]  # greatest depth of each text


def states_of(states: torch.Tensor | None, parents: torch.Tensor) -> torch.Tensor | None:
    """Returns states `[B, m, S]` at columns `[B, m]`; `None` if there are none."""
    if states is None:
        return None
    if len(parents) == 1:
        return states[:, parents[0]]
    return states[torch.arange(len(parents), device=parents.device)[:, None], parents]


class TreeBuilder(Protocol):
    def __call__(
        self, expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits, /
    ) -> list[DraftTree]:
        """Grows a tree for each text of a batch.

        Args:
            root_tokens: `[B]`, int64, the last accepted token of each text.
            vocab_ids: `[V']`, int64, the token id of each column of the log-probabilities.
        """


def beam_trees(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Grows trees by beam search on cumulative probability (Lyanna; EAGLE-2, section 4.1). A `TreeBuilder`.

    Each depth expands the `beam_width` most probable nodes of the depth before. Of all children seen, the `tree_size`
    most probable stay. They form a tree, because a child is never more probable than its parent. `beam_width` does not
    limit the children that stay: where the drafter is unsure, many children of the root are worth more than deep paths.
    """
    found = FoundNodes.of(*searched(expansion, root_tokens, vocab_ids, limits))
    return [
        found.best_tree(row, limits.tree_size, depth, limits.threshold) for row, depth in enumerate(limits.max_depths)
    ]


def searched(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> tuple[torch.Tensor, list[int]]:
    """Returns the root and the children that a beam search finds, in one tensor, and the number of nodes of each depth.

    The tensor is `[3, B, nodes]`, int32: tokens, ranks of the parents at the depth before, and the bits of the scores,
    which are float32. Each depth has its `tree_size` most probable children, the best first. `max_depths` and
    `threshold` are ignored. Nothing is read back from the device, and all shapes follow from the arguments.
    """
    found = expansion.search(root_tokens, limits)
    if found is not None:
        return found
    tokens = root_tokens[:, None]
    scores = torch.zeros_like(tokens, dtype=torch.float32)
    states: torch.Tensor | None = None
    levels = [(tokens, torch.zeros_like(tokens), scores)]
    most = 1 if limits.beam_width == 1 else limits.tree_size  # most children of a level that may stay
    for level in range(1, expansion.depth + 1):
        scores, columns, parents, states = expansion.best(level, tokens, states, scores, most)
        tokens = vocab_ids[columns]
        levels.append((tokens, parents, scores))
        if level < expansion.depth:
            width = limits.beam_width
            tokens, scores, states = tokens[:, :width], scores[:, :width], states_of(states, parents[:, :width])
    sizes = [level[0].shape[1] for level in levels]
    tokens, parents, scores = (torch.cat(column, dim=1) for column in zip(*levels, strict=True))
    return torch.stack([tokens.int(), parents.int(), scores.view(torch.int32)]), sizes


@dataclass(frozen=True)
class FoundNodes:
    """What `searched` has found, read back: `[B][nodes]`, root first, parents before their children."""

    tokens: list[list[int]]
    parents: list[list[int]]  # indices in the same list; of the root without meaning
    depths: list[int]
    scores: list[list[float]]

    @classmethod
    def of(cls, found: torch.Tensor, sizes: Sequence[int]) -> FoundNodes:
        """Reads the device once."""
        found = found.cpu()
        tokens, ranks = found[:2].tolist()
        depths = [depth for depth, size in enumerate(sizes) for _ in range(size)]
        begins = [0, *itertools.accumulate(sizes)]
        before = [begins[max(depth - 1, 0)] for depth in depths]
        parents = [list(map(operator.add, before, of_text)) for of_text in ranks]
        return cls(tokens, parents, depths, found[2].view(torch.float32).tolist())

    def best_tree(self, row: int, size: int, depth: int, threshold: float) -> DraftTree:
        """Makes a tree of the `size` most probable nodes down to `depth`; no path is less probable than `threshold`."""
        scores, parents, depths = self.scores[row], self.parents[row], self.depths
        least = math.log(threshold) if threshold > 0 else -sys.float_info.max
        likely = [node for node in range(1, len(scores)) if scores[node] >= least and depths[node] <= depth]
        # Stable, since of equal scores the earlier one may be the other's parent.
        kept = sorted(sorted(likely, key=lambda node: -scores[node])[:size])
        places = {0: 0}
        nodes = [(self.tokens[row][0], -1, 0, 0.0)]
        for node in kept:
            if parents[node] in places:
                places[node] = len(nodes)
                nodes.append((self.tokens[row][node], places[parents[node]], depths[node], scores[node]))
        return from_nodes(nodes)


@dataclass(frozen=True)
class Builder:
    """A function that grows trees, with properties of its trees."""

    grow: TreeBuilder
    draws: bool = False  # whether the nodes are drawn
    whole: bool = False  # whether choosing a tree's best nodes would undo what it grows


TREE_BUILDERS: Registry[Builder] = Registry("tree_builder", {"beam": Builder(beam_trees)})  # by the option's value
Path = tuple[int, ...]  # drafted tokens after the root


def grown_tree(
    root: int,
    following: Callable[[Path], Sequence[tuple[int, float]]],
    tree_size: int,
    depth: int,
    width: int | None = None,
    threshold: float = 0.0,
) -> DraftTree:
    """Returns the most probable continuations of a root as a tree.

    Args:
        following: returns likely tokens after a path with their conditional probabilities, the most probable first.
        tree_size: most nodes besides the root.
        depth: greatest depth of a node.
        width: most children of a node; 1 gives a chain, None is no limit.
        threshold: least probability of a path, 0 to 1.
    """
    floor = math.log(max(threshold, NGRAM_LEAST))
    nodes, paths = [(root, -1, 0, 0.0)], list[Path]([()])
    waiting: list[tuple[float, int, int, int]] = []  # heap of (cost, order of arrival, parent, token)
    arrivals = itertools.count()
    while len(nodes) <= tree_size:
        newest = len(nodes) - 1
        if len(paths[newest]) < depth:
            for token, probability in following(paths[newest])[:width]:
                score = nodes[newest][3] + min(math.log(probability), 0.0)
                if score >= floor:
                    heapq.heappush(waiting, (-score, next(arrivals), newest, token))
        if not waiting:
            break
        cost, _, parent, token = heapq.heappop(waiting)
        nodes.append((token, parent, nodes[parent][2] + 1, -cost))
        paths.append((*paths[parent], token))
    return from_nodes(nodes)
