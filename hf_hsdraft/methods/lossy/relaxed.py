"""Lossy rules without training: the target's choices, with some replaced by drafted tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...core.checks import Limit, integer, is_integer, is_number
from ...core.draft_tree import DraftTree
from ...core.options import Option
from ...verify.registry import VERIFIERS
from ...verify.verdict import Nodes, Verdict, Verifier, own_choice, walk


@dataclass(frozen=True)
class Mismatch:
    """A node after which the target's choice was not drafted, while other tokens were."""

    tree: DraftTree
    children: list[dict[int, int]]  # of each node, see `DraftTree.children`
    node: int
    probabilities: torch.Tensor  # `[V]`, float32, the target's distribution after the node, after all processors
    best: int  # the child that the drafter expects the target to choose, of those that the target can choose
    own: Callable[[int], int]  # returns the target's choice at a node, the same one each time
    taps: torch.Tensor | None  # see `Nodes`

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
        children, choice, relaxed = tree.children(), own_choice(nodes), []
        own = functools.cache(lambda node: choice(node, path_tokens(tree, node)))  # draws once

        def choose(node: int, tokens: list[int]) -> int:
            token = own(node)
            if token in children[node] or not children[node]:
                return token
            probabilities = nodes.scores(node, tokens)[0].softmax(dim=-1)
            scored = [child for token, child in children[node].items() if token < len(probabilities)]
            allowed = [child for child in scored if probabilities[tree.tokens[child]] > 0]
            if not allowed:
                return token
            best = max(allowed, key=lambda child: tree.scores[child])
            if not self.accepts(Mismatch(tree, children, node, probabilities, best, own, nodes.taps)):
                return token
            relaxed.append(best)
            return tree.tokens[best]

        return replace(walk(tree, choose, nodes.ends), relaxed=tuple(relaxed))


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    """Returns the drafted tokens of a node's path, without the root's."""
    return [tree.tokens[each] for each in tree.path(node)]


def normalised_entropy(probabilities: torch.Tensor, most: int = 0) -> float:
    """Returns the entropy of `[V]`, from 0 (certain) to 1 (uniform), of its `most` most probable tokens if above 0."""
    if most:
        probabilities = probabilities.topk(min(most, len(probabilities))).values
        probabilities = probabilities / probabilities.sum()
    entropy = torch.special.entr(probabilities).sum() / torch.tensor(float(len(probabilities))).log()
    return min(max(float(entropy), 0.0), 1.0)


SHARE = Limit(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_PROBABILITY = Limit(lambda value: is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
_ABOVE_0 = Limit(lambda value: is_number(value) and 0 < value < math.inf, "a number above 0")
_MOST_PROBABLE = Limit(
    lambda value: is_integer(value) and (value == 0 or 2 <= value <= 1024),
    "0 (the whole vocabulary) or an integer from 2 to 1024",
)
_WINDOW = integer(64, least=0)


def option(name: str, default: float, limit: Limit, doc: str) -> Option:
    """Declares an option of a lossy rule."""
    return Option(name, default, limit, f"Lossy rule `{name.partition('_')[0]}`: {doc}")


class FLy(Relaxed):
    """Lossy. The rule of "Training-Free Loosely Speculative Decoding" (arXiv:2511.22972).

    A mismatch is a node after which the target's choice was not drafted. Its best child, the one that the drafter
    expects the target to choose, is accepted instead if

    1. the target is uncertain: the entropy of its distribution there, over log |V|, is above `fly_entropy`;
    2. the next `fly_window` choices of the target after that child were all drafted.

    So the decision waits for the window, within the same draft. A mismatch among the last `fly_window` depths is never
    accepted: too few tokens follow. On a chain this is the paper's rule. In a tree the second condition follows the
    target's choices below the best child, whichever branch they are on.

    With sampling, the target's choices are its draws in both conditions. Draws of a window that fails are repeated.

    With `fly_entropy=1` the rule is exact.
    """

    looks_ahead = True
    own_options = (
        option(
            "fly_entropy", 0.3, SHARE, "normalised entropy above which a mismatch may be forgiven; 1 forgives none."
        ),
        option(
            "fly_window", 6, _WINDOW, "number of drafted tokens after a mismatch that the target has to agree with."
        ),
        option(
            "fly_most_probable",
            0,
            _MOST_PROBABLE,
            "number of the most probable tokens whose entropy counts; the authors' code takes 3.",
        ),
    )
    fly_entropy: float
    fly_window: int
    fly_most_probable: int

    def accepts(self, mismatch: Mismatch) -> bool:
        if normalised_entropy(mismatch.probabilities, self.fly_most_probable) <= self.fly_entropy:
            return False
        node = mismatch.best
        for _ in range(self.fly_window):
            children = mismatch.children[node]
            if not children or mismatch.own(node) not in children:
                return False
            node = children[mismatch.own(node)]
        return True


VERIFIERS["fly"] = FLy()


class Typical(Relaxed):
    """Lossy. The threshold of "Medusa" (arXiv:2401.10774, section 2.3.1), the simple reference for lossy rules.

    A drafted token x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), with p the target's distribution and H
    its entropy in nats; epsilon is `typical_threshold` and delta is `typical_delta`. Medusa takes the longest tree
    path whose tokens are all accepted this way. Here, as in the other rules, the target's choice wins wherever it
    was drafted, and the threshold decides about the drafter's best token elsewhere. On greedy chains both are the
    same for delta below 1, where the most probable token is always typical.

    With `typical_threshold=1` and a `typical_delta` of the vocabulary's size the rule is exact.
    """

    own_options = (
        option("typical_threshold", 0.09, _PROBABILITY, "epsilon, a probability that is always enough."),
        option("typical_delta", 0.3, _ABOVE_0, "delta, how much of exp(-entropy) is enough."),
    )
    typical_threshold: float
    typical_delta: float

    def accepts(self, mismatch: Mismatch) -> bool:
        entropy = float(torch.special.entr(mismatch.probabilities).sum())
        return mismatch.probability > min(self.typical_threshold, self.typical_delta * math.exp(-entropy))


VERIFIERS["typical"] = Typical()
