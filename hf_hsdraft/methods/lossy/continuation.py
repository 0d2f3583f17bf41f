"""N-grams that continue the most probable drafted path, as FLy (arXiv:2511.22972) drafts on two levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core.checks import Limit, demand, integer
from ...core.draft_tree import DraftTree, from_nodes
from ...core.tuning import NGRAM_DEPTH
from ...drafters.base.draft_options import METHOD_OPTIONS, DraftOptions, MethodOption
from ...drafters.base.protocol import Ask, Call
from ...drafters.lookup.ngrams import NgramCache, NgramSession
from ...engine.drafting import Drafting

NAME = "ngram_continuation"


def followed(ngrams: NgramCache, drafted: Sequence[int], most: int) -> list[tuple[int, float]]:
    """Returns up to `most` most probable tokens after a drafted path, each with its conditional probability."""
    found: list[tuple[int, float]] = []
    while len(found) < most and (ranked := ngrams.after([*drafted, *(token for token, _ in found)])):
        found.append(ranked[0])
    return found


def likeliest_path(tree: DraftTree) -> list[int]:
    """Returns the node indices of the path that follows the most probable child down to a leaf."""
    children, nodes = tree.children(), [0]
    while children[nodes[-1]]:
        nodes.append(max(children[nodes[-1]].values(), key=tree.scores.__getitem__))
    return nodes[1:]


def extended(tree: DraftTree, node: int, following: Sequence[tuple[int, float]]) -> DraftTree:
    """Returns the tree, without `log_probs`, with tokens and conditional probabilities after leaf `node`."""
    nodes = list(zip(tree.tokens, tree.parents, tree.depths, tree.scores, strict=True))
    for token, probability in following:
        _, _, depth, score = nodes[node]
        nodes.append((token, node, depth + 1, score + math.log(probability)))
        node = len(nodes) - 1
    return from_nodes(nodes)


def continued(ngrams: NgramCache, most: int, tree: DraftTree, ask: Ask) -> DraftTree:
    """Extends the most probable path of a drafter's tree by up to `most` n-gram nodes, within the limits of `ask`.

    In a full tree they replace the least probable ones. A lone root stays alone: nothing is to be drafted.
    """
    if len(tree) == 1 or ngrams.last != ask.root:
        return tree

    def following(tree: DraftTree) -> list[tuple[int, float]]:
        path = likeliest_path(tree)
        return followed(ngrams, [tree.tokens[node] for node in path], min(most, ask.depth - len(path)))

    added = following(tree)
    kept = tree.first(max(ask.size - len(added), 1))
    if added and len(kept) < len(tree):  # the path's end may have been dropped
        added = following(kept)
    return extended(kept, likeliest_path(kept)[-1], added[: ask.size - len(kept) + 1]) if added else tree


def _fits(drafter: Any, options: DraftOptions) -> None:
    wanted = "ngram_length is 0, and without n-grams there is nothing to append; set that to 1 or more, or this to 0"
    demand(options.ngram_length > 0, NAME, options.own[NAME], wanted)


def _begin(call: Call, drafting: Drafting) -> None:
    ngrams, most = drafting.sessions[0], call.options.own[NAME]
    if isinstance(ngrams, NgramSession) and ngrams is not drafting.session:
        drafting.extend = lambda tree, ask: continued(ngrams.caches[ask.row], most, tree, ask)


_MOST = Limit(integer(NGRAM_DEPTH, 0).valid, f"an integer from 0 (none) to {NGRAM_DEPTH}")
METHOD_OPTIONS[NAME] = MethodOption(NAME, 0, _MOST, "Most n-gram nodes that are appended.", fits=_fits, begin=_begin)
