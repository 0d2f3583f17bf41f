"""Typical acceptance: a drafted token is accepted if it is probable enough for the target's uncertainty."""

from __future__ import annotations

import math

import torch

from ...core.checks import is_number
from ...core.options import Option
from ...verify.registry import VERIFIERS
from .relaxed import Mismatch, Relaxed


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
        Option(
            "typical_threshold",
            0.09,
            lambda value: is_number(value) and 0 < value <= 1,
            "a number above 0, at most 1",
            "Lossy rule `typical`: epsilon, a probability that is always enough.",
        ),
        Option(
            "typical_delta",
            0.3,
            lambda value: is_number(value) and 0 < value < math.inf,
            "a number above 0",
            "Lossy rule `typical`: delta, how much of exp(-entropy) is enough.",
        ),
    )
    typical_threshold: float
    typical_delta: float

    def accepts(self, mismatch: Mismatch) -> bool:
        entropy = float(torch.special.entr(mismatch.probabilities).sum())
        return mismatch.probability > min(self.typical_threshold, self.typical_delta * math.exp(-entropy))


VERIFIERS["typical"] = Typical()
