"""The hidden-state drafter ("Make Every Draft Count")."""
