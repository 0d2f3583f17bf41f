"""Small language models with the target's tokenizer as drafters."""
