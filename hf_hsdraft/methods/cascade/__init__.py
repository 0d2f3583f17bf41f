"""Hierarchies of drafters: middle models verify what a quicker drafter drafts, and the target verifies last."""

from ...drafters.base.registry import register_drafter
from .cascade_drafter import CascadeConfig, CascadeDrafter

register_drafter(CascadeConfig.model_type, CascadeConfig, CascadeDrafter)
