"""Reuse of what was drafted and not accepted ("Make Every Draft Count", resampling).

Its options. `injectors` has the states that are left, and what they still predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ...core.checks import is_number
from ...core.options import Option

logger = logging.get_logger(__name__)

_GONE = "skip"  # drafters of an earlier version may ask for it
REUSES = ("none", "ensemble", "resample")
REUSE_OPTIONS = (
    Option("reuse", "none", lambda value: value in (*REUSES, _GONE), f"one of {', '.join(REUSES)}"),
    Option("reuse_weight", 0.4, lambda value: is_number(value) and value >= 0.0, "a number of 0 or more"),
)


def reuse_of(options: Mapping[str, Any]) -> tuple[str, float]:
    """Returns what becomes of rejected drafts, and what old logits weigh in `"ensemble"`, the new ones weighing 1."""
    reuse, weight = options["reuse"], options["reuse_weight"]
    if reuse == _GONE:
        logger.warning_once("reuse='skip' is gone, as it gained nothing measurable: nothing is reused")
        return "none", weight
    return reuse, weight
