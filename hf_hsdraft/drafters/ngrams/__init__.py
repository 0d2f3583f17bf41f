"""Drafts out of the text itself ("Cacheback")."""

from ..registry import register_drafter
from .cacheback import CachebackConfig, CachebackDrafter

register_drafter(CachebackConfig.model_type, CachebackConfig, CachebackDrafter)
