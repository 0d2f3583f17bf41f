"""Small language models as drafters, trained on the target's own answers."""
