"""FLy: a mismatch is accepted where the target is uncertain and then continues as the draft does."""

from __future__ import annotations

from ...core.checks import is_integer, is_number
from ...core.options import Option
from ...verify.registry import VERIFIERS
from .relaxed import Mismatch, Relaxed, normalised_entropy

LONGEST_WINDOW = 64


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
        Option(
            "fly_entropy",
            0.3,
            lambda value: is_number(value) and 0 <= value <= 1,
            "a number from 0 to 1",
            "Lossy rule `fly`: normalised entropy above which a mismatch may be forgiven; 1 forgives none.",
        ),
        Option(
            "fly_window",
            6,
            lambda value: is_integer(value) and 0 <= value <= LONGEST_WINDOW,
            f"an integer from 0 to {LONGEST_WINDOW}",
            "Lossy rule `fly`: number of drafted tokens after a mismatch that the target has to agree with.",
        ),
        Option(
            "fly_most_probable",
            0,
            lambda value: is_integer(value) and (value == 0 or 2 <= value <= 1024),
            "0 (the whole vocabulary) or an integer from 2 to 1024",
            "Lossy rule `fly`: number of the most probable tokens whose entropy counts; the authors' code takes 3.",
        ),
    )
    fly_entropy: float
    fly_window: int
    fly_most_probable: int

    def accepts(self, mismatch: Mismatch) -> bool:
        if normalised_entropy(mismatch.probabilities, self.fly_most_probable) <= self.fly_entropy:
            return False
        tree, node = mismatch.tree, mismatch.best
        tokens = [*mismatch.tokens, tree.tokens[node]]
        for _ in range(self.fly_window):
            token = mismatch.own(node, tokens) if mismatch.children[node] else -1
            if token not in mismatch.children[node]:
                return False
            node, tokens = mismatch.children[node][token], [*tokens, token]
        return True


VERIFIERS["fly"] = FLy()
