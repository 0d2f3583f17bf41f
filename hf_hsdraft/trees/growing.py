"""Grows a draft tree from next tokens that are looked up path by path, the most probable path first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from ..core.draft_tree import DraftTree, from_nodes
from ..core.tuning import TUNING

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
    floor = math.log(max(threshold, TUNING.ngram_least))
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
