"""Registers the n-gram family."""

from ..base.registry import register_drafter
from .cacheback import CachebackConfig, CachebackDrafter

register_drafter(CachebackConfig.model_type, CachebackConfig, CachebackDrafter)
