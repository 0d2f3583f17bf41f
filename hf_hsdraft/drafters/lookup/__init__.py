"""Drafts looked up in earlier text: n-grams of a text itself ("Cacheback"), and past texts ("SuffixDecoding")."""
