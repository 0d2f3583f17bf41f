"""Drafters whose slots are made of one attended position, all depths at once ("SpecFormer")."""

from ...drafters.base.registry import register_drafter
from .configuration_specformer import SpecFormerConfig
from .modeling_specformer import SpecFormerDrafter

register_drafter(SpecFormerConfig.model_type, SpecFormerConfig, SpecFormerDrafter)
