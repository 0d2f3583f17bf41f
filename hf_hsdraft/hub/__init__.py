"""Commands about drafters on the Hub and in its cache; what they need travels with every drafter."""
