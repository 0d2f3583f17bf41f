"""Drafters that are the target's own first layers and a small network that imitates the others (FastVLM)."""

from ...drafters.base.registry import register_drafter
from .configuration_self import SelfDraftConfig
from .modeling_self import SelfDrafter

register_drafter(SelfDraftConfig.model_type, SelfDraftConfig, SelfDrafter)
