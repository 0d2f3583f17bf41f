"""Drafts of the target by itself, with a LoRA adapter for the rows of noise tokens (Uno)."""
