"""Drafters that extrapolate the target's hidden states autoregressively (EAGLE-3) or in parallel (P-EAGLE)."""
