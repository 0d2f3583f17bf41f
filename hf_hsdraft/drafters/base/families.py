"""Imports the core families, which register themselves; families of methods are loaded by name.

If a folder's `__init__` registers its family, importing the folder imports the whole family. Folders used in parts, as
by the vLLM plugin, register it in a separate file instead.
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
