"""Measuring: one definition per figure."""
