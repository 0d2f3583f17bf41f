"""NVIDIA's SPEED-Bench: its prompts, and its figures in a report of `hsdraft bench`."""
