"""The same numbers faster on a device. Without this room every text is the same."""
