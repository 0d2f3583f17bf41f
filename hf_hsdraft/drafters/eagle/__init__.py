"""Drafters that extrapolate the target's hidden states autoregressively (EAGLE-3) or in parallel (P-EAGLE)."""

from ..base.formats import Format, register_format, with_fields
from .drafter import EagleDrafter
from .formats import describe, fit, is_eagle, is_eagle4, is_speculators, refuse_eagle4

for _name, _rank, _matches, _fields in (
    ("speculators eagle3 and peagle", 10, is_speculators, ("speculators_model_type",)),
    ("EAGLE-3", 70, is_eagle, ("hidden_size", "vocab_size")),
):
    _load, _possible = EagleDrafter.from_checkpoint, with_fields(*_fields)
    register_format(
        Format(_name, _rank, _matches, _load, describe=describe, drafter=EagleDrafter, possible=_possible, fit=fit)
    )

register_format(
    Format(
        "EAGLE-4", 0, lambda checkpoint: is_eagle4(checkpoint.config), refuse_eagle4, possible=is_eagle4, loads=False
    )
)
