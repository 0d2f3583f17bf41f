"""Builders that grow draft trees."""
