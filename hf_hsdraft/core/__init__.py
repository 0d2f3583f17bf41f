"""Types and helpers used by all other packages."""
