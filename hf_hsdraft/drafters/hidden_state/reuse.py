"""Options for reusing rejected drafts ("Make Every Draft Count", resampling); `injectors` has the mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ...core.checks import is_number
from ...core.options import Option

logger = logging.get_logger(__name__)

_GONE = "skip"  # may be saved in drafters of an earlier version
REUSES = ("none", "ensemble", "resample")
REUSE_OPTIONS = (
    Option("reuse", "none", lambda value: value in (*REUSES, _GONE), f"one of {', '.join(REUSES)}"),
    Option("reuse_weight", 0.4, lambda value: is_number(value) and value >= 0.0, "a number of 0 or more"),
)


def reuse_of(options: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the form of reuse, and the weight of old logits relative to new ones."""
    reuse, weight = options["reuse"], options["reuse_weight"]
    if reuse == _GONE:
        logger.warning_once("reuse='skip' is gone, as it gained nothing measurable: nothing is reused")
        return "none", weight
    return reuse, weight
