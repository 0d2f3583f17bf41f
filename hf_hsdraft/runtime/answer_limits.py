"""How far an answer may grow, and which tokens end it."""

from __future__ import annotations

from typing import Any

from .target_limits import furthest_position


def room_left(target: Any, length: int) -> int:
    """Returns the number of tokens that fit behind a prompt; raises a ValueError if the prompt fills the context
    window.

    transformers would read such a prompt anyway and output noise.
    """
    window = furthest_position(target)
    if length >= window:
        raise ValueError(
            f"the prompt has {length} tokens and the model's context window is {window}: "
            f"shorten it to {window - 1} tokens or fewer"
        )
    return window - length


def end_tokens(target: Any, config: Any = None) -> set[int]:
    """Returns the ids of the tokens that end an answer, by `config` or else by the target's generation config."""
    configs = (config, target.generation_config)
    found: Any = next((each.eos_token_id for each in configs if each is not None and each.eos_token_id is not None), [])
    return set(found) if isinstance(found, list | tuple) else {found}
