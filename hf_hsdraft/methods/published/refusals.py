"""Formats of files that are not drafted with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.checks import printable
from .checkpoint import AnyCheckpoint
from .formats import Format, fields_told, register_format


def with_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a `Format.possible` that checks for these fields."""
    return lambda config: all(config.get(name) is not None for name in names)


def register_refusal(name: str, rank: int, why: Callable[[AnyCheckpoint], str], possible: Callable[..., Any]) -> None:
    """Registers a format of files that are not drafted with; `why` says why not, and is empty for other files."""

    def refuse(checkpoint: AnyCheckpoint, **_: Any) -> Any:
        raise ValueError(f"{printable(checkpoint.name)} {why(checkpoint)}")

    def describe(checkpoint: AnyCheckpoint) -> dict[str, str]:
        told = printable(f"{checkpoint.name} {why(checkpoint)}", 400)
        return {**fields_told(checkpoint), "cannot be loaded": told}

    matches = lambda checkpoint: bool(why(checkpoint))  # noqa: E731
    register_format(Format(name, rank, matches, refuse, describe, possible=possible, loads=False))
