"""Rejection sampling without replacement ("Recursive Speculative Decoding", algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...core.draft_tree import DraftTree
from ...verify.registry import VERIFIERS
from ...verify.verdict import Nodes, OwnChoice, Verdict, Verifier, draw_token, walk


class Rejection(Verifier):
    """Offers the children of a node to the target in the order in which the drafter drew them.

    p is the target's distribution and q the drafter's. A child is accepted with probability min(1, p / q). After a
    rejection, p becomes the normalised positive part of p - q, and q loses the rejected token. After the last child the
    next token is drawn from p. This accepts more drafted tokens than the target's own draw, above all at high
    temperature. It is exact for drawn trees only. Greedy calls take the target's own choice.
    """

    exact = True
    own_choices = True
    drawn_nodes = True

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        if nodes.draw is None:
            return OwnChoice().judge(tree, nodes)
        children = tree.children()

        def choose(node: int, tokens: list[int]) -> int:
            p = nodes.scores(node, tokens)[0].softmax(dim=-1)
            return _draw(p, children[node], tree.log_probs[node] if children[node] else None, tree.vocab_ids)

        return walk(tree, choose, nodes.ends)


def _draw(
    p: torch.Tensor, children: Iterable[int], log_probs: torch.Tensor | None, vocab_ids: torch.Tensor | None
) -> int:
    """Draws the next token: an accepted child, or another token.

    Args:
        p: `[V]`, the target's probabilities.
        children: tokens of the children, in the order of drawing.
        log_probs: `[V']`, log q; `None` without children. Tokens outside `vocab_ids` have q = 0.
        vocab_ids: `[V']`, int64, the token id of each column of `log_probs`.
    """
    if log_probs is not None and vocab_ids is not None:
        q = torch.zeros_like(p)
        q[vocab_ids.to(p.device)] = log_probs.to(p.device, p.dtype).exp()
        for token in children:
            if float(torch.rand((), device=p.device)) * float(q[token]) < float(p[token]):
                return token
            left = (p - q).clamp(min=0.0)
            total = left.sum()
            if total > 0:  # 0 only by rounding, where p and q are equal
                p = left / total
            q[token] = 0.0
            q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return draw_token(p)


VERIFIERS["rejection"] = Rejection()
