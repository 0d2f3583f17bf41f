"""Training a drafter beside its target."""
