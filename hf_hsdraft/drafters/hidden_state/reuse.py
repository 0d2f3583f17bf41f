"""Reuse of what was drafted and not accepted ("Make Every Draft Count", resampling).

With a tokens accepted and the bonus token after them, a drafted state g_d with d > a is still a prediction: of the
token at depth index d - a - 1 of the next round. It was drafted without the tokens accepted since, so the injector is
told them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import is_number
from ...core.options import Option
from .injectors import Injector

logger = logging.get_logger(__name__)

_GONE = "skip"  # drafters of an earlier version may ask for it
REUSES = ("none", "ensemble", "resample")
REUSE_OPTIONS = (
    Option("reuse", "none", lambda value: value in (*REUSES, _GONE), f"one of {', '.join(REUSES)}"),
    Option("reuse_weight", 0.4, lambda value: is_number(value) and value >= 0.0, "a number of 0 or more"),
)

# Maps a token and the injector's state before it (`None` at the start of a path) to the state after it.
Advance = Callable[[int, torch.Tensor | None], torch.Tensor]


def reuse_of(options: Mapping[str, Any]) -> tuple[str, float]:
    """Returns what becomes of rejected drafts, and what old logits weigh in `"ensemble"`, the new ones weighing 1."""
    reuse, weight = options["reuse"], options["reuse_weight"]
    if reuse == _GONE:
        logger.warning_once("reuse='skip' is gone, as it gained nothing measurable: nothing is reused")
        return "none", weight
    return reuse, weight


@dataclass(frozen=True)
class Leftover:
    """Drafted states that still predict positions ahead, of one text.

    Attributes:
        hidden: `[K', D]`, g_{a+1} .. g_{K-1}.
        path: the tokens that were accepted since these states were drafted, from their root on.
    """

    hidden: torch.Tensor
    path: tuple[int, ...]

    @classmethod
    def of(cls, drafted: torch.Tensor | None, root: int, accepted: Sequence[int]) -> Leftover | None:
        """What is left of states `[K, D]` drafted from `root`, of which `accepted` tokens were right."""
        if drafted is None or len(drafted) <= len(accepted) + 1:
            return None
        return cls(drafted[len(accepted) + 1 :], (root, *accepted))

    def since(self, advance: Advance) -> torch.Tensor:
        """The injector's state after the path, `[1, S]`."""
        state = None
        for token in self.path:
            state = advance(token, state)
        assert state is not None
        return state


def ensemble(
    logits: torch.Tensor,
    leftover: Leftover,
    root: int,
    weight: float,
    head: Callable[[torch.Tensor], torch.Tensor],
    injector: Injector,
    advance: Advance,
) -> None:
    """Form A: the old logits join the new ones `[depth, V']`, in place, each at its own position of the text.

    Args:
        root: the last accepted token. The new state at the first depth has read it; the old one is told it.
        weight: of the old logits, the new ones weighing 1.
        head: maps drafted states to draft logits.
        injector: of the drafter.
    """
    hidden = leftover.hidden[: len(logits)]
    old = head(hidden)
    told = injector.told(old[:1], hidden[:1], advance(root, leftover.since(advance)))
    old = torch.cat([told, old[1:]])
    logits[: len(old)] = (logits[: len(old)] + weight * old) / (1.0 + weight)
