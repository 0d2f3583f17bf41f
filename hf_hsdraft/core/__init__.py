"""Small words that every room uses."""
