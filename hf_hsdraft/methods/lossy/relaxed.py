"""The frame of lossy rules: the target's own choices, and here and there a drafted token in place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...core.draft_tree import DraftTree
from ...verify.verdict import ChooseToken, Nodes, Verdict, Verifier, own_choice, walk


@dataclass(frozen=True)
class Mismatch:
    """A node after which the target's own token was not drafted, while other tokens were.

    Attributes:
        tree: the draft tree.
        children: of each node of the tree, see `DraftTree.children`.
        node: index of the node.
        tokens: the drafted tokens of its path, without the root's.
        probabilities: `[V]`, float32, the target's distribution after the node, after all processors.
        best: index of the child that the drafter expects the target to choose, of those that the target can choose.
        own: returns the target's own token at a node. Asking twice gives the same token.
        taps: see `Nodes`.
    """

    tree: DraftTree
    children: list[dict[int, int]]
    node: int
    tokens: list[int]
    probabilities: torch.Tensor
    best: int
    own: ChooseToken
    taps: torch.Tensor | None

    @property
    def probability(self) -> float:
        """The target's probability of the best child's token."""
        return float(self.probabilities[self.tree.tokens[self.best]])


class Relaxed(Verifier):
    """Follows the target's own choices. Where one was not drafted, the rule may accept a drafted token instead.

    A derived class says by `accepts` when. It is asked about one child only: the one with the best score, which the
    drafter expects the target to choose. On a chain it is the next token. N-grams of the tree count as the drafter's
    tokens.

    Sampling: the target draws its token first, at each node. A drafted token that is accepted instead takes the draw's
    place. Where the draws can be foreseen, scores are the chances to be drawn with the coming random numbers, see
    `Foresight`. So the best child is the one that the drafter expects the target to draw.

    No token is accepted that the call's processors forbid, or that the target does not score. A target may embed more
    tokens than it scores, as Mllama does.
    """

    exact = False
    own_draws = True

    def accepts(self, mismatch: Mismatch) -> bool:
        """Returns whether the best child is accepted in place of the target's own token."""
        raise NotImplementedError

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        children, own, relaxed = tree.children(), remembered(own_choice(nodes)), []

        def choose(node: int, tokens: list[int]) -> int:
            token = own(node, tokens)
            if token in children[node] or not children[node]:
                return token
            probabilities = nodes.scores(node, tokens)[0].softmax(dim=-1)
            scored = [child for token, child in children[node].items() if token < len(probabilities)]
            allowed = [child for child in scored if probabilities[tree.tokens[child]] > 0]
            if not allowed:
                return token
            best = max(allowed, key=lambda child: tree.scores[child])
            if not self.accepts(Mismatch(tree, children, node, tokens, probabilities, best, own, nodes.taps)):
                return token
            relaxed.append(best)
            return tree.tokens[best]

        return replace(walk(tree, choose, nodes.ends), relaxed=tuple(relaxed))


def remembered(choose: ChooseToken) -> Callable[[int, list[int]], int]:
    """Returns a function that chooses at each node once, and knows the choice when it is asked again."""
    known: dict[int, int] = {}

    def ask(node: int, tokens: list[int]) -> int:
        if node not in known:
            known[node] = choose(node, tokens)
        return known[node]

    return ask


def normalised_entropy(probabilities: torch.Tensor, most: int = 0) -> float:
    """Returns the entropy of a distribution, from 0 (one token is certain) to 1 (all are equally probable).

    Args:
        probabilities: `[V]`.
        most: number of the most probable tokens that are looked at, their probabilities summing up to 1 again; 0 for
            all tokens. It is their entropy over log `most`, instead of over log V.
    """
    if most:
        probabilities = probabilities.topk(min(most, len(probabilities))).values
        probabilities = probabilities / probabilities.sum()
    entropy = torch.special.entr(probabilities).sum() / torch.tensor(float(len(probabilities))).log()
    return min(max(float(entropy), 0.0), 1.0)
