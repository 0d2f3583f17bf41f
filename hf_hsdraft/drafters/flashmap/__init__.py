"""Drafters of whole blocks of tokens by a flow map from noise (FlashMap), in the files of their authors."""

from ..base.formats import register_format
from .drafter import FORMAT

register_format(FORMAT)
