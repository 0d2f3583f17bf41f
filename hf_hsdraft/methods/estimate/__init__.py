"""Says what training and decoding would take, by arithmetic."""
