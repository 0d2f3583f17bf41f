"""The same numbers, faster on a GPU."""
