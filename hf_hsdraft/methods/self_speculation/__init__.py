"""Drafters that are the target's own first layers and a small network that imitates the others (FastVLM)."""
