"""Drafting by a target's own layers, some of which are left out."""
