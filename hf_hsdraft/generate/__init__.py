"""The one room that touches transformers' `generate()`."""
