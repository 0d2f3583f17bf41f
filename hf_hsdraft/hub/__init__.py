"""Drafters on the Hub and in its cache: what they are, and their figures."""
