"""Adds a hint to errors of `generate()` that were given a drafting option."""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation.utils import GenerationMixin

from ..drafters.base.draft_options import option_names
from ..drafters.base.protocol import Drafter

_PLACE = "drafter.generation_config"


def allow_hints() -> None:
    """Adds to the error about unknown arguments of `generate()` where drafting options are set. Idempotent."""
    original = GenerationMixin._validate_model_kwargs
    if getattr(original, "_hsdraft_hints", False):
        return

    @functools.wraps(original)
    def _validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
        try:
            original(self, model_kwargs)
        except ValueError as error:
            found = sorted(model_kwargs.keys() & _option_names())
            if not found:
                raise
            places = ", ".join(f"{_PLACE}.{name} = {model_kwargs[name]!r}" for name in found)
            raise ValueError(f"{error}. Drafting options are set on the drafter, before the call: {places}") from None

    _validate_model_kwargs._hsdraft_hints = True  # type: ignore[attr-defined]
    GenerationMixin._validate_model_kwargs = _validate_model_kwargs


def _option_names() -> set[str]:
    """Returns the names of all drafting options of all families."""
    names, families = option_names(), [Drafter]
    while families:
        family = families.pop()
        names |= {option.name for option in family.own_options}
        families += family.__subclasses__()
    return names
