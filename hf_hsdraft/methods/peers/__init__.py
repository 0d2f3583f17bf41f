"""Drafting of other projects as variants of `hsdraft bench`."""
