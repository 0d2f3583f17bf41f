"""The texts that a drafter is trained on."""
