"""Drafts here, verification there: a server that verifies for many devices, and its clients ("SLED", 2506.09397)."""
