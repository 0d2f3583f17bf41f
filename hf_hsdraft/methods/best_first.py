"""Trees grown node by node, always by the most probable path that is left (DDTree)."""

from __future__ import annotations

import heapq
import math

import torch

from ..core.draft_tree import DraftTree, Expansion, TreeLimits, from_nodes


def best_first_trees(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Grows trees for drafters whose nodes of a depth all have the same children and no states. A `TreeBuilder`.

    The tree is the best one of its size, as a beam of unlimited width would find it. `beam_width` is ignored. The
    probabilities of all depths leave the device in one transfer.
    """
    scores = torch.zeros_like(root_tokens[:, None], dtype=torch.float32)
    levels = []
    for level in range(1, expansion.depth + 1):
        values, columns, _, states = expansion.best(level, root_tokens[:, None], None, scores, limits.tree_size)
        assert states is None, "nodes with states know their path"
        levels.append((values, vocab_ids[columns]))
    log_probs, tokens = (torch.stack(column, dim=1).tolist() for column in zip(*levels, strict=True))
    least = math.log(limits.threshold) if limits.threshold > 0 else -math.inf
    rows = zip(root_tokens.tolist(), tokens, log_probs, limits.max_depths, strict=True)
    return [
        _best_tree(root, own_tokens[:depth], own_scores[:depth], limits.tree_size, least)
        for root, own_tokens, own_scores, depth in rows
    ]


def _best_tree(root: int, tokens: list[list[int]], log_probs: list[list[float]], size: int, least: float) -> DraftTree:
    """Makes a tree from tokens and log-probabilities of each depth, the best first.

    The heap holds paths without a node: the next sibling of each node, and its first child. All others come after one
    of these, so the best path of the heap is the best that is left. Among equal ones the shorter comes first. `least`
    is the least log-probability of a path.
    """
    nodes = [(root, -1, 0, 0.0)]
    waiting: list[tuple[float, int, tuple[int, ...], int]] = []  # cost, depth, ranks along the path, parent

    def wait(ranks: tuple[int, ...], parent: int) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth <= len(tokens) and rank < len(tokens[depth - 1]):
            score = nodes[parent][3] + log_probs[depth - 1][rank]
            if score >= least and score > -math.inf:
                heapq.heappush(waiting, (-score, depth, ranks, parent))

    wait((0,), 0)
    while waiting and len(nodes) <= size:
        cost, depth, ranks, parent = heapq.heappop(waiting)
        nodes.append((tokens[depth - 1][ranks[-1]], parent, depth, -cost))
        wait((*ranks[:-1], ranks[-1] + 1), parent)
        wait((*ranks, 0), len(nodes) - 1)
    return from_nodes(nodes)
