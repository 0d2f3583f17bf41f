"""Drafts with the target's own layers for multi-token prediction."""

from .drafter import MtpDrafter
from .layers import layers_in

__all__ = ["MtpDrafter", "layers_in"]
