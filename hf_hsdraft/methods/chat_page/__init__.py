"""A chat page in the browser."""
