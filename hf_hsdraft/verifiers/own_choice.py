"""Verification by the target's own choice: exact for any tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..trees.draft_tree import DraftTree
from .verdict import ChooseToken, Draw, Nodes, ScoresAt, Verdict, walk


class OwnChoice:
    """At each node the token that plain decoding would choose there.

    Nothing looks at the drafted children: they only decide how far one forward pass reaches. So sampling consumes
    random numbers exactly as plain decoding does: one draw a token, none after the text's last one.
    """

    exact = True
    taps: Sequence[int] = ()
    own_draws = True
    drawn_nodes = False

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        if nodes.draw is None and not nodes.processed:
            return walk(tree, greedy_choice(nodes.logits), nodes.ends)
        return walk(tree, own_choice(nodes.scores, nodes.draw), nodes.ends)


def greedy_choice(logits: torch.Tensor) -> ChooseToken:
    """The most probable token of each node, for `logits` `[nodes, V]` that need no processing."""
    choices = logits.max(dim=-1).indices.tolist()  # the first of equals, as argmax, and faster on CPUs
    return lambda node, tokens: choices[node]


def own_choice(scores_at: ScoresAt, draw: Draw | None) -> ChooseToken:
    """The target's own token at each node.

    Args:
        draw: draws a token; `None` takes the most probable one.
    """

    def choose(node: int, tokens: list[int]) -> int:
        scores = scores_at(node, tokens)
        return int(scores.argmax(dim=-1)) if draw is None else draw(scores.softmax(dim=-1))

    return choose
