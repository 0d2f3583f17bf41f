"""Drafting options of FlashMap drafters."""

from ...core.checks import is_integer
from ...core.options import Option

FLOW_STEPS = Option(
    "flow_steps",
    None,
    lambda value: value is None or (is_integer(value) and value > 0),
    "a number of jumps above 0, or None for that in the drafter's files",
    "Number of jumps from noise to tokens in a draft of a FlashMap drafter.",
)
