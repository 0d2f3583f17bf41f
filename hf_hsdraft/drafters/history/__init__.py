"""Drafts from past texts, shared by the calls of a drafter ("SuffixDecoding")."""
