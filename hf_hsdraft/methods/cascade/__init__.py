"""Hierarchies of drafters: middle models verify what a quicker drafter drafts, and the target verifies last."""
