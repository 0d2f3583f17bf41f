"""The families of drafters that come with the package; each registers itself. A new one is one more name here."""

from . import block, eagle, hidden_state, ngrams

__all__ = ["block", "eagle", "hidden_state", "ngrams"]
