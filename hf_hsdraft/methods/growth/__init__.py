"""Larger drafters out of trained ones (PRISM)."""
