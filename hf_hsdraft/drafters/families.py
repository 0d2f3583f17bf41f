"""The families of drafters that come with the package; each registers itself. A new one is one more name here.

Those whose parts work with older versions of transformers too register in a file of their own.
"""

from . import block, causal_lm, eagle, specformer
from .hidden_state import hidden_state_family
from .ngrams import ngram_family

__all__ = ["block", "causal_lm", "eagle", "hidden_state_family", "ngram_family", "specformer"]
