"""Divergences that gained nothing here over those of the core."""
