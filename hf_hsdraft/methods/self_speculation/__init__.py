"""Drafters that are the target's first layers and a small network that imitates the others (FastVLM)."""
