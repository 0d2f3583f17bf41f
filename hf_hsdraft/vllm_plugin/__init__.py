"""Drafters of this package in vLLM, as chains. Works with older versions of transformers than the rest needs."""
