"""Drafts without a network: what followed the same tokens before, in the text itself or in past texts."""
