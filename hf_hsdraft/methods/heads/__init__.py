"""Drafters that are heads over the target's last hidden state: Medusa, Hydra, MLPSpeculator, LSTM speculators."""
