"""A drafter as files: loading, saving, pushing, the card, and the code that travels with it."""
