"""Drafting options of block drafters."""

from ...core.options import Option

CONFIDENCE = Option(
    "use_confidence_head",
    True,
    lambda value: isinstance(value, bool),
    "true or false",
    "Whether a confidence head decides with the drafter's probabilities which nodes are drafted.",
)
