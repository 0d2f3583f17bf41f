"""The name of a model's cache: `cache` since transformers 5.24, `past_key_values` before. Only this file knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a model's inputs, or `None`."""
    return kwargs.get(CACHE)


def returned_cache(outputs: Any) -> Any:
    """The cache among the outputs of a model or of `generate()`, or `None`."""
    return getattr(outputs, CACHE, None)
