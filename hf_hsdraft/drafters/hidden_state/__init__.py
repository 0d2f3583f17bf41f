"""Drafters that read hidden states of the target ("Make Every Draft Count", system Lyanna)."""

from ..registry import register_drafter
from .configuration_hsdraft import HSDraftConfig
from .draft_support import register_support
from .modeling_hsdraft import HSDrafter
from .package_support import PackageSupport

register_drafter(HSDraftConfig.model_type, HSDraftConfig, HSDrafter)
register_support(PackageSupport())
