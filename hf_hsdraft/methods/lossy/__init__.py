"""Lossy rules of verification, what they cost (`hsdraft quality`), and the classifier of one (`train-verifier`)."""
