"""Trees of drawn nodes, and their verification by rejection without replacement (RSD)."""
