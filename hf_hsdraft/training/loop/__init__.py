"""One run of training."""
