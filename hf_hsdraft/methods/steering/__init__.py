"""Small language models steered by the target's hidden states while they draft (SD^2)."""
