"""Self-speculation with some of the target's layers skipped."""
