"""Registers self-speculation: `AutoDrafter` and `AutoModel` load its drafters by their `model_type`."""

from ...drafters.base.registry import register_drafter
from .configuration_self import SelfDraftConfig
from .modeling_self import SelfDrafter

register_drafter(SelfDraftConfig.model_type, SelfDraftConfig, SelfDrafter)
