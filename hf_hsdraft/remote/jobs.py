"""What texts wait for, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.draft_tree import DraftTree
from .verified_text import VerifiedText


@dataclass(frozen=True)
class Verified:
    """What became of a tree.

    Attributes:
        tokens: emitted.
        drafted: number of these that the tree held.
        reach: how deep the next draft may be.
        finished: whether the text has ended.
        taps: hidden states of the positions read, as they are sent.
        batch: number of texts in the forward.
        seconds: that it took.
    """

    tokens: list[int]
    drafted: int
    reach: int
    finished: bool
    taps: bytes
    batch: int
    seconds: float


@dataclass(frozen=True)
class PieceRead:
    """What became of a piece of a prompt.

    Attributes:
        taps: hidden states that are wanted of it, as they are sent.
        first: the first token, after the last piece.
    """

    taps: bytes
    first: Verified | None


@dataclass(frozen=True)
class Job:
    """Something that a text waits for.

    Attributes:
        text: the text.
        tree: to verify; `None` to read the next piece of the prompt, and after the last one to emit the first token.
        done: told of the outcome: what became of the tree or of the piece, or the error.
        came: when it came in.
    """

    text: VerifiedText
    tree: DraftTree | None
    done: Callable[[Any], None]
    came: float = field(default_factory=time.monotonic)
