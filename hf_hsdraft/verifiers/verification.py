"""Rules that accept a path of a draft tree. All of them are exact: they emit what the target alone would have emitted.

Every rule is a way to choose the next token at a node; `walk` follows the choices for as long as they were drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..trees.draft_tree import DraftTree

VERIFICATIONS = ("walk", "rejection")

# Given a node and the tokens drafted on the way to it (the root's excluded), the next token of the text there.
ChooseToken = Callable[[int, list[int]], int]

# Given a node and the tokens drafted on the way to it, the target's scores [1, V] there, after all processors. Asking
# again gives the same and changes nothing.
ScoresAt = Callable[[int, list[int]], torch.Tensor]

# Given probabilities [1, V], a token.
Draw = Callable[[torch.Tensor], int]

# Given the nodes accepted so far and the tokens chosen at the root and at each node: does the text end with the last?
EndsText = Callable[[list[int], list[int]], bool]


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Attributes:
        path: accepted node indices, the root excluded; may be empty.
        next_token: the token the target chose after the path, the bonus token.
        finished: the text ends with it.
        num_drafted: emitted tokens that the tree held: the path's, and the last token of a text if it was drafted.
    """

    path: list[int]
    next_token: int
    finished: bool
    num_drafted: int

    def cut(self, tree: DraftTree, length: int) -> Verdict:
        """The same decision, taken back to a path of at most `length` nodes: what follows will be decided anew."""
        if len(self.path) <= length:
            return self
        following = tree.tokens[self.path[length]]
        return replace(self, path=self.path[:length], next_token=following, finished=False, num_drafted=length + 1)


def walk(tree: DraftTree, choose: ChooseToken, ends: EndsText) -> Verdict:
    """Follows the chosen tokens through the tree for as long as they are drafted."""
    children = tree.children()
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        token = choose(node, tokens)
        following = children[node].get(token)
        tokens.append(token)
        finished = ends(path, tokens)
        if following is None or finished:
            return Verdict(path, token, finished, len(path) + (following is not None))
        path.append(following)
        node = following


def greedy_choice(logits: torch.Tensor) -> ChooseToken:
    """The most probable token of each node, for `logits` `[nodes, V]` that need no processing."""
    choices = logits.max(dim=-1).indices.tolist()  # the first of equals, as argmax, and faster on CPUs
    return lambda node, tokens: choices[node]


def own_choice(scores_at: ScoresAt, draw: Draw | None) -> ChooseToken:
    """The target's own token at each node, as plain decoding would choose it; with `walk`, exact for any tree.

    Nothing looks at the drafted children: they only decide how far one forward pass reaches. So sampling consumes
    random numbers exactly as plain decoding does: one draw a token, none after the text's last one.

    Args:
        draw: draws a token; `None` takes the most probable one.
    """

    def choose(node: int, tokens: list[int]) -> int:
        scores = scores_at(node, tokens)
        return int(scores.argmax(dim=-1)) if draw is None else draw(scores.softmax(dim=-1))

    return choose


def draw_token(probabilities: torch.Tensor) -> int:
    """A draw from `[1, V]` by the device's own generator, as plain decoding makes it."""
    return int(torch.multinomial(probabilities, num_samples=1))


def rejection_choice(scores_at: ScoresAt, tree: DraftTree, vocab_ids: torch.Tensor) -> ChooseToken:
    """Rejection without replacement ("Recursive Speculative Decoding", algorithm 2); exact for sampled trees only.

    At each node its children, draws without replacement from the drafter's distribution q, are offered in their order.
    One is accepted with probability min(1, p / q); otherwise p becomes what q does not explain of it, and q loses the
    rejected token. After the last child the token is drawn from what is left of p. It accepts more often than the
    target's own draw meets a child, above all at high temperature.

    Args:
        vocab_ids: `[V']`, int64, tokens behind the columns of `tree.log_probs`; q is 0 outside them.
    """
    siblings: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        siblings[tree.parents[node]].append(tree.tokens[node])

    def choose(node: int, tokens: list[int]) -> int:
        scores = scores_at(node, tokens)
        log_probs = tree.log_probs[node] if siblings[node] else None
        return _without_replacement(scores[0].softmax(dim=-1), siblings[node], log_probs, vocab_ids)

    return choose


def _without_replacement(
    p: torch.Tensor, children: Sequence[int], log_probs: torch.Tensor | None, vocab_ids: torch.Tensor
) -> int:
    if children:
        assert log_probs is not None
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
