"""The families of the core; each registers itself. Those of methods are loaded by their names.

A folder whose `__init__` registers its family cannot be entered without all that the family imports. Where parts of it
are used without the rest, as the plugin for vLLM does, a file of the folder registers the family.
"""

from .. import block, eagle
from .. import language_model as causal_lm
from ..hidden_state import hidden_state_family
from ..ngrams import ngram_family

__all__ = [
    "block",
    "causal_lm",
    "eagle",
    "hidden_state_family",
    "ngram_family",
]
