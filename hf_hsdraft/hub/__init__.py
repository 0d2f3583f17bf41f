"""Commands about drafters on the Hub and in its cache."""
