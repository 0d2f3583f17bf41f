"""Registers SpecFormer: `AutoDrafter` and `AutoModel` load its drafters by their `model_type`."""

from ...drafters.base.registry import register_drafter
from .configuration_specformer import SpecFormerConfig
from .modeling_specformer import SpecFormerDrafter

register_drafter(SpecFormerConfig.model_type, SpecFormerConfig, SpecFormerDrafter)
