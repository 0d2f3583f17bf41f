"""Jobs of the thread that runs the target, and their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.draft_tree import DraftTree
from .verified_text import VerifiedText


@dataclass(frozen=True)
class Verified:
    """Outcome of verifying a tree; fields as in `messages.Accepted`."""

    tokens: list[int]
    drafted: int
    reach: int
    finished: bool
    taps: bytes
    batch: int
    seconds: float


@dataclass(frozen=True)
class PieceRead:
    """Outcome of reading a piece of a prompt: packed hidden states, and the first token after the last piece."""

    taps: bytes
    first: Verified | None


@dataclass(frozen=True)
class Job:
    """One step of a text.

    Attributes:
        tree: to verify; `None` to read the next piece of the prompt, and emit the first token after the last one.
        done: called with the outcome: `Verified`, `PieceRead` or the error.
    """

    text: VerifiedText
    tree: DraftTree | None
    done: Callable[[Any], None]
    came: float = field(default_factory=time.monotonic)
