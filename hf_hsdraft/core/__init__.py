"""Types and helpers used by all other packages; imports none of them."""
