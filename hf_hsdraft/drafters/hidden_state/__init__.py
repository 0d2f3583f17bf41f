"""Drafters that read hidden states of the target ("Make Every Draft Count", system Lyanna)."""

from ..registry import register_drafter
from .configuration_hsdraft import HSDraftConfig
from .modeling_hsdraft import HSDrafter

register_drafter(HSDraftConfig.model_type, HSDraftConfig, HSDrafter)
