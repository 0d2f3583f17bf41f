"""Rejection sampling without replacement ("Recursive Speculative Decoding", algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..trees.draft_tree import DraftTree
from .own_choice import OwnChoice
from .verdict import ChooseToken, Nodes, ScoresAt, Verdict, draw_token, walk


class Rejection:
    """Offers the children of a node, draws without replacement from the drafter's distribution q, in their order.

    One is accepted with probability min(1, p / q); otherwise p becomes what q does not explain of it, and q loses the
    rejected token. After the last child the token is drawn from what is left of p. It accepts more often than the
    target's own draw meets a child, above all at high temperature. Exact for drawn trees only. Greedy calls take the
    target's own choice.
    """

    exact = True
    taps: Sequence[int] = ()
    own_draws = False
    drawn_nodes = True

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        if nodes.draw is None:
            return OwnChoice().judge(tree, nodes)
        return walk(tree, rejection_choice(nodes.scores, tree), nodes.ends)


def rejection_choice(scores_at: ScoresAt, tree: DraftTree) -> ChooseToken:
    """The choice of each node of a tree whose nodes were drawn; q is 0 outside `tree.vocab_ids`."""
    siblings: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        siblings[tree.parents[node]].append(tree.tokens[node])

    def choose(node: int, tokens: list[int]) -> int:
        scores = scores_at(node, tokens)
        log_probs = tree.log_probs[node] if siblings[node] else None
        return _without_replacement(scores[0].softmax(dim=-1), siblings[node], log_probs, tree.vocab_ids)

    return choose


def _without_replacement(
    p: torch.Tensor, children: Sequence[int], log_probs: torch.Tensor | None, vocab_ids: torch.Tensor | None
) -> int:
    if children:
        assert log_probs is not None and vocab_ids is not None
        q = torch.zeros_like(p)
        q[vocab_ids.to(p.device)] = log_probs.to(p.device, p.dtype).exp()
        for token in children:
            if float(torch.rand((), device=p.device)) * float(q[token]) < float(p[token]):
                return token
            left = (p - q).clamp(min=0.0)
            total = left.sum()
            if total > 0:  # nothing is left only by rounding, where p and q are equal
                p = left / total
            q[token] = 0.0
            q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return draw_token(p)
