"""Drafters that read hidden states of the target ("Make Every Draft Count", system Lyanna)."""
