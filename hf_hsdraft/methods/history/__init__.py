"""Drafts from past texts of the same target, in memory or in a folder (REST)."""
