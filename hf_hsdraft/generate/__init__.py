"""All patches of transformers' `generate()`."""
