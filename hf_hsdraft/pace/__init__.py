"""How much to draft."""
