"""The families of drafters that come with the package; each registers itself. A new one is one more name here."""

from . import block, causal_lm, eagle, hidden_state, ngrams, specformer

__all__ = ["block", "causal_lm", "eagle", "hidden_state", "ngrams", "specformer"]
