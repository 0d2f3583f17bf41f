"""Drafts from n-grams of the text itself ("Cacheback")."""
