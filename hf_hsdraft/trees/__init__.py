"""Builders that grow draft trees, and their attention masks."""
