"""Small language models that hidden states of the target steer while they draft (SD^2)."""
