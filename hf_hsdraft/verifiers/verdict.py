"""The seam of verification: what a rule is told of a draft tree's nodes, and what it decides.

A rule is a way to choose the next token at a node. `walk` follows the choices for as long as they were drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..trees.draft_tree import DraftTree

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
class Nodes:
    """What the target made of a draft tree's nodes, of one text.

    Attributes:
        logits: `[nodes, V]`, as the target gave them.
        scores: the scores at a node after all processors of the call.
        ends: whether the text ends with a token.
        draw: draws a token from probabilities; `None` where the most probable one is taken.
        processed: whether processors change scores, or somebody keeps them; otherwise the logits say all.
        taps: `[nodes, taps * D]`, the hidden states that drafter and rule asked for.
    """

    logits: torch.Tensor
    scores: ScoresAt
    ends: EndsText
    draw: Draw | None = None
    processed: bool = True
    taps: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Attributes:
        path: accepted node indices, the root excluded; may be empty.
        next_token: the token that the target chose after the path, the bonus token.
        finished: whether the text ends with it.
        num_drafted: number of emitted tokens that the tree held: the path's, and the last token of a text if it was
            drafted.
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


class Verifier(Protocol):
    """A rule that accepts a path of a draft tree.

    Attributes:
        exact: whether what is emitted has the target's own distribution. A rule that has not is lossy: it is never a
            default, and the call's statistics say so.
        taps: indices of the target's hidden states that the rule reads.
        own_draws: whether each token is one draw from the target's own distribution; then draws can be foreseen.
        drawn_nodes: whether nodes have to be draws of the drafter; the best nodes of a beam would bias the text.
    """

    exact: bool
    taps: Sequence[int]
    own_draws: bool
    drawn_nodes: bool

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        """Decides about a tree. Judging changes nothing: asked again, it may only draw other random numbers."""
        ...


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


def draw_token(probabilities: torch.Tensor) -> int:
    """A draw from `[1, V]` by the device's own generator, as plain decoding makes it."""
    return int(torch.multinomial(probabilities, num_samples=1))
