"""Drafters of whole blocks of tokens in one forward (DFlash, DFlash2, DSpark) in several published formats."""

from ..base.formats import register_format
from .formats import FORMATS

for _form in FORMATS:
    register_format(_form)
