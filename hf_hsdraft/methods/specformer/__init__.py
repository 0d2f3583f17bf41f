"""Drafters whose slots are made of one attended position, all depths at once ("SpecFormer")."""
