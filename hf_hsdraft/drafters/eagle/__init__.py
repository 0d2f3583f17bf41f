"""Drafters that go on from the target's hidden states by their own ones ("EAGLE-3"), and parallel ones (P-EAGLE)."""

from ..formats import Format, register_format
from .eagle_formats import is_eagle, is_speculators
from .modeling_eagle import EagleDrafter

register_format(Format("speculators eagle3 and peagle", 10, is_speculators, EagleDrafter.from_checkpoint))
register_format(Format("EAGLE-3", 70, is_eagle, EagleDrafter.from_checkpoint))
