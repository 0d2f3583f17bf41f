"""Drafters that read the target's hidden states ("Make Every Draft Count", system Lyanna)."""
