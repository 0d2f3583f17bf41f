"""Drafters of whole blocks of tokens in one forward (DFlash, DFlash2, DSpark) in several published formats."""
