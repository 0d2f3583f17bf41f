"""Registers the family of n-gram drafters."""

from ..base.registry import register_drafter
from .cacheback import CachebackConfig, CachebackDrafter

register_drafter(CachebackConfig.model_type, CachebackConfig, CachebackDrafter)
