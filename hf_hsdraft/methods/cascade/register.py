"""Registers cascades: `AutoDrafter` loads them by their `model_type`."""

from ...drafters.base.registry import register_drafter
from .cascade_drafter import CascadeConfig, CascadeDrafter

register_drafter(CascadeConfig.model_type, CascadeConfig, CascadeDrafter)
