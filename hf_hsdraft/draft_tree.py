"""Draft trees: plain data, and the builders that grow one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a text, as a tree of tokens.

    Node 0 is the root: the last accepted token, which the target has not read yet. Parents stand before their children
    and siblings carry distinct tokens, so every node is one distinct continuation.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, -1 for the root.
        depths: distance from the root; a node's position in the text is the root's plus its depth.
        scores: log-probability of the path by the drafter, 0 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree that drafts nothing."""
        return cls((token,), (-1,), (0,), (0.0,))

    def children(self) -> list[dict[int, int]]:
        """For each node, its children: token id to node index."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]][self.tokens[node]] = node
        return children

    def path(self, node: int) -> list[int]:
        """Node indices from the root's child down to `node`; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def ancestor_mask(self) -> torch.Tensor:
        """`[nodes, nodes]`, bool: True where the row's node may see the column's, its ancestors and itself."""
        size = len(self.tokens)
        mask = torch.eye(size, dtype=torch.bool)
        for node in range(1, size):
            mask[node] |= mask[self.parents[node]]
        return mask


# Maps (depth of the new nodes, parents' tokens [n], parents' states) to the log-probabilities of the children,
# [n, V'], and the states after reading the parents' tokens. States are None at the root.
Expand = Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def build_beam_tree(
    expand: Expand,
    root_token: int,
    vocab_ids: torch.Tensor,
    *,
    depth: int,
    beam_width: int,
    tree_size: int,
    threshold: float = 0.0,
) -> DraftTree:
    """Grows a tree by beam search on cumulative probability and keeps its best nodes (Lyanna; EAGLE-2, section 4.1).

    Each depth expands the `beam_width` most probable nodes of the one before. Of all candidates seen, the `tree_size`
    most probable stay: a child is never more probable than its parent, so what stays is a tree. Children are not
    limited to the beam's width: where the drafter is unsure, many siblings of the root are worth more than deep paths.

    Args:
        expand: gives the children's log-probabilities.
        vocab_ids: `[V']`, int64, token ids behind the columns.
        depth: greatest depth, 1 or more.
        beam_width: nodes expanded per depth; 1 gives a chain.
        tree_size: nodes beside the root.
        threshold: paths less probable than this are left out, 0 to 1.
    """
    device = vocab_ids.device
    tokens = torch.tensor([root_token], device=device)
    scores = torch.zeros(1, device=device)
    states: torch.Tensor | None = None
    all_tokens, all_scores, all_parents, all_depths = [], [], [], []
    beam = torch.zeros(1, dtype=torch.long, device=device)  # index of each beam node among all candidates, plus one
    count = 0
    branching = 1 if beam_width == 1 else min(tree_size, len(vocab_ids))
    for level in range(1, depth + 1):
        log_probs, states = expand(level, tokens, states)
        best, columns = log_probs.topk(branching, dim=-1)
        candidate_scores = (scores[:, None] + best).flatten()
        candidate_tokens = vocab_ids[columns].flatten()
        parents = beam.repeat_interleave(branching)
        all_tokens.append(candidate_tokens)
        all_scores.append(candidate_scores)
        all_parents.append(parents)
        all_depths.append(torch.full_like(parents, level))
        if level == depth:
            break
        scores, chosen = candidate_scores.topk(min(beam_width, len(candidate_scores)))
        tokens = candidate_tokens[chosen]
        beam = chosen + 1 + count
        states = states[chosen // branching]
        count += len(candidate_scores)
    return _best_nodes(
        root_token,
        torch.cat(all_tokens),
        torch.cat(all_parents),
        torch.cat(all_depths),
        torch.cat(all_scores),
        tree_size,
        threshold,
    )


def _best_nodes(
    root_token: int,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    tree_size: int,
    threshold: float,
) -> DraftTree:
    """The `tree_size` most probable candidates as a tree."""
    # Ties go to the earlier candidate, which is the parent: a probability of exactly 1 must not orphan a child.
    order = scores.argsort(descending=True, stable=True)[:tree_size].sort().values
    picked = torch.stack([order, tokens[order], parents[order], depths[order]]).T.tolist()
    floor = math.log(threshold) if threshold > 0 else -math.inf
    index_of = {0: 0}
    nodes: list[tuple[int, int, int, float]] = [(root_token, -1, 0, 0.0)]
    for (candidate, token, parent, depth), score in zip(picked, scores[order].tolist(), strict=True):
        if score < floor or parent not in index_of:
            continue
        index_of[candidate + 1] = len(nodes)
        nodes.append((token, index_of[parent], depth, score))
    return _from_nodes(nodes)


def merge_trees(first: DraftTree, second: DraftTree, tree_size: int) -> DraftTree:
    """The union of two trees with the same root, cut to its `tree_size` most probable nodes.

    A path found in both keeps the better of its two scores, so no child outranks its parent.

    Raises:
        ValueError: the roots differ.
    """
    if first.tokens[0] != second.tokens[0]:
        raise ValueError(f"trees with different roots cannot be merged: {first.tokens[0]} and {second.tokens[0]}")
    nodes = [list(node) for node in zip(first.tokens, first.parents, first.depths, first.scores, strict=True)]
    place = {(int(parent), int(token)): index for index, (token, parent, _, _) in enumerate(nodes)}
    mapped = [0] * len(second)
    for index in range(1, len(second)):
        key = (mapped[second.parents[index]], second.tokens[index])
        if key not in place:
            place[key] = len(nodes)
            nodes.append([second.tokens[index], key[0], second.depths[index], second.scores[index]])
        mapped[index] = place[key]
        nodes[mapped[index]][3] = max(nodes[mapped[index]][3], second.scores[index])
    ranked = sorted(range(1, len(nodes)), key=lambda index: (-nodes[index][3], nodes[index][2], index))
    kept = [0, *sorted(ranked[:tree_size], key=lambda index: (nodes[index][2], index))]
    renumbered = {old: new for new, old in enumerate(kept)}
    return _from_nodes(
        [
            (int(nodes[old][0]), renumbered.get(int(nodes[old][1]), -1), int(nodes[old][2]), float(nodes[old][3]))
            for old in kept
        ]
    )


def _from_nodes(nodes: Sequence[tuple[int, int, int, float]]) -> DraftTree:
    tokens, parents, depths, scores = zip(*nodes, strict=True)
    return DraftTree(tokens, parents, depths, scores)
