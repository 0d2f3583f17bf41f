"""How much a conversation may still grow."""

from __future__ import annotations

from typing import Any

from ..target.target_limits import furthest_position


def room_left(target: Any, length: int) -> int:
    """Returns the number of tokens that fit behind a prompt.

    Args:
        target: the model that answers.
        length: number of tokens of the prompt.

    Raises:
        ValueError: the prompt alone fills the target's context window. transformers would read it all the same, and
            the answer would be noise.
    """
    window = furthest_position(target)
    if length >= window:
        raise ValueError(
            f"the prompt has {length} tokens and the model's context window is {window}: "
            f"shorten it to {window - 1} tokens or fewer"
        )
    return window - length
