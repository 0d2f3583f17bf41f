"""What a pipeline compares of target and drafter: a drafter fits whatever a target calls its special tokens."""

from __future__ import annotations

from typing import Any


class _Any:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "any"


ANY = _Any()


class AnySpecialTokens:
    """The configuration of a drafter, as a pipeline compares it with that of a target.

    A pipeline takes an assistant without a tokenizer only if both configurations have the same special tokens. A
    drafter writes no such tokens, and the target alone decides what ends a text. So it fits any special tokens.

    Args:
        config: The configuration that all other fields are read from.
    """

    bos_token_id = eos_token_id = pad_token_id = ANY

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._config, name)
