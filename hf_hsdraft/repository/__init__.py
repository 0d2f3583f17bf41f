"""A drafter as files: loading, saving, what travels to the Hub, its card."""
