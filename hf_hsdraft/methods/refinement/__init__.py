"""Refinement of drafts by a tiny model of the target's text, and trees of the p best paths."""
