"""Drafts out of the text itself ("Cacheback")."""
