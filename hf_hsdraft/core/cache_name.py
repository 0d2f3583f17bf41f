"""What transformers calls the cache of a model: `cache` since 5.24, `past_key_values` before. Only this file knows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the inputs of a model; `None` if there is none."""
    return kwargs.get(CACHE)


def returned_cache(outputs: Any) -> Any:
    """The cache among the outputs of a model or of `generate()`; `None` if there is none."""
    return getattr(outputs, CACHE, None)


def takes_cache(model: Any) -> bool:
    """Whether a model's forward goes on from a cache that it is given."""
    return CACHE in inspect.signature(model.forward).parameters
