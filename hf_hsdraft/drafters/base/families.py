"""Imports the core families, which register themselves; families of methods are loaded by name.

If a folder's `__init__` registers its family, importing the folder imports the whole family. Folders used in parts, as
by the vLLM plugin, register it in a separate file instead.
"""

from .. import block, eagle, language_model
from ..hidden_state import hidden_state_family
from ..ngrams import ngram_family

__all__ = [
    "block",
    "eagle",
    "hidden_state_family",
    "language_model",
    "ngram_family",
]
