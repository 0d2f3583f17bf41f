"""One call of `generate()`: set-up, rounds, growing texts, output."""
