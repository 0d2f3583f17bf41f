"""Drafts with the target's own layers for multi-token prediction."""
