"""Registers the family of hidden-state drafters."""

from ..base.registry import register_drafter
from .configuration_hsdraft import HSDraftConfig
from .draft_support import register_support
from .modeling_hsdraft import HSDrafter
from .package_support import PackageSupport

register_drafter(HSDraftConfig.model_type, HSDraftConfig, HSDrafter)
register_support(PackageSupport())
