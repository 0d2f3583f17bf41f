"""Drafters that compute the slots of all depths at once from one attended position ("SpecFormer")."""
