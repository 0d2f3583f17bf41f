"""Draft trees as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


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

    def likeliest_path(self) -> list[int]:
        """Returns the node indices of the path that follows the most probable child down to a leaf."""
        children, nodes = self.children(), [0]
        while children[nodes[-1]]:
            nodes.append(max(children[nodes[-1]].values(), key=self.scores.__getitem__))
        return nodes[1:]

    def extended(self, node: int, following: Sequence[tuple[int, float]]) -> DraftTree:
        """Returns the tree, without `log_probs`, with tokens and conditional probabilities after leaf `node`."""
        nodes = list(zip(self.tokens, self.parents, self.depths, self.scores, strict=True))
        for token, probability in following:
            _, _, depth, score = nodes[node]
            nodes.append((token, node, depth + 1, score + math.log(probability)))
            node = len(nodes) - 1
        return from_nodes(nodes)

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
