"""What drafters of all families share."""
