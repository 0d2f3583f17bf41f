"""Trees of the best whole paths ("Exploring and Improving Drafts in Blockwise Parallel Decoding", p-best drafts)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...core.draft_tree import DraftTree, from_nodes
from ...trees.tree_builders import TREE_BUILDERS, Builder, Expansion, FoundNodes, TreeLimits, searched


def p_best_trees(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Merges the most probable full-depth paths into a tree, best first, until it is full. See `TreeBuilder`.

    A path's probability is the product of its nodes' probabilities, refinements included. The paths come from a beam
    search that keeps `beam_width` paths per depth; they are the best overall if that many hold every path but the last
    token. A path that does not fit contributes its first nodes.

    `beam_trees` instead takes the best nodes, whether or not a path continues from them.
    """
    found = FoundNodes.of(*searched(expansion, root_tokens, vocab_ids, limits))
    least = math.log(limits.threshold) if limits.threshold > 0 else -math.inf
    rows = zip(found.tokens, found.parents, found.scores, limits.max_depths, strict=True)
    return [
        _merged(list(zip(tokens, parents, found.depths, scores, strict=True)), depth, limits.tree_size, least)
        for tokens, parents, scores, depth in rows
    ]


def _merged(found: Sequence[tuple[int, int, int, float]], depth: int, size: int, least: float) -> DraftTree:
    """Makes a tree of at most `size` nodes besides the root from the best paths to some depth.

    `found` are (token, parent, depth, score) of the nodes, root first; none below the score `least` is taken.
    """
    deepest = min(depth, found[-1][2])
    ends = [node for node, (_, _, at, score) in enumerate(found) if at == deepest and score > -math.inf]
    places, nodes = {0: 0}, [(found[0][0], -1, 0, 0.0)]
    for end in sorted(ends, key=lambda node: -found[node][3]):
        path = []
        while end not in places:
            path.append(end)
            end = found[end][1]
        for number in reversed(path):
            token, parent, at, score = found[number]
            if len(nodes) > size or score < least:
                break
            places[number] = len(nodes)
            nodes.append((token, places[parent], at, score))
    return from_nodes(nodes)


TREE_BUILDERS["p_best"] = Builder(p_best_trees, whole=True)
