"""The base of lossy rules: the target's choices, with some replaced by drafted tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...core.draft_tree import DraftTree
from ...verify.verdict import ChooseToken, Nodes, Verdict, Verifier, own_choice, walk


@dataclass(frozen=True)
class Mismatch:
    """A node after which the target's choice was not drafted, while other tokens were.

    Attributes:
        children: of each node, see `DraftTree.children`.
        tokens: drafted tokens of the node's path, without the root's.
        probabilities: `[V]`, float32, the target's distribution after the node, after all processors.
        best: the child that the drafter expects the target to choose, of those that the target can choose.
        own: returns the target's choice at a node, the same one each time.
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
    """Follows the target's choices. Where one was not drafted, the rule may accept a drafted token instead.

    Subclasses implement `accepts`. It is asked about one child only: the one with the best score, which the drafter
    expects the target to choose; on a chain, the next token. N-grams in the tree count as the drafter's tokens.

    Sampling: the target draws its token first, at each node. A drafted token that is accepted replaces the draw. Where
    the draws can be foreseen, scores are the probabilities of being drawn with the coming random numbers, see
    `Foresight`. So the best child is the one that the drafter expects the target to draw.

    Tokens that the call's processors forbid, or that the target does not score, are never accepted. A target may embed
    more tokens than it scores, as Mllama does.
    """

    exact = False
    own_draws = True

    def accepts(self, mismatch: Mismatch) -> bool:
        """Returns whether the best child is accepted in place of the target's choice."""
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
    known: dict[int, int] = {}

    def ask(node: int, tokens: list[int]) -> int:
        if node not in known:
            known[node] = choose(node, tokens)
        return known[node]

    return ask


def normalised_entropy(probabilities: torch.Tensor, most: int = 0) -> float:
    """Returns the entropy of a distribution `[V]`, from 0 (one token is certain) to 1 (uniform).

    With `most` above 0, only that many most probable tokens count, renormalised, and the entropy is over log `most`.
    """
    if most:
        probabilities = probabilities.topk(min(most, len(probabilities))).values
        probabilities = probabilities / probabilities.sum()
    entropy = torch.special.entr(probabilities).sum() / torch.tensor(float(len(probabilities))).log()
    return min(max(float(entropy), 0.0), 1.0)
