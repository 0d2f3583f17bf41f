"""Lossy rules of verification, what they cost (`hsdraft measure quality`), and the classifier of `pivot`."""
