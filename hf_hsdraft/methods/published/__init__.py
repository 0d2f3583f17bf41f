"""What drafters in published formats share: configuration, network, layers, and formats as tables."""
