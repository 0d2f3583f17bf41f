"""One call of `generate()`: its set-up, the rounds, the texts as they grow, what is returned."""
