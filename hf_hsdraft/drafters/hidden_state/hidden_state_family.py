"""Registers the family of hidden-state drafters."""

from ..base.registry import register_drafter
from .configuration_hsdraft import HSDraftConfig
from .modeling_hsdraft import HSDrafter

register_drafter(HSDraftConfig.model_type, HSDraftConfig, HSDrafter)
