"""Drafted decoding as a model of lm-evaluation-harness."""
