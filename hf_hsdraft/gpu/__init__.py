"""Faster forwards on GPUs."""
