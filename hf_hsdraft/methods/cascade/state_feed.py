"""Feeds a drafter that reads hidden states with those of a middle model instead of the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...drafters.base.protocol import Accepted
from .levels import SupposingSession
from .lm_reader import LMReader


class StateFeed:
    """Feeds the session below a middle model; `reader` has the taps of that session's drafter."""

    def __init__(self, lower: SupposingSession, reader: LMReader) -> None:
        self._lower, self._reader = lower, reader
        self._told: dict[int, int] = {}  # positions of each text that the session has observed

    def tell(self, row: int, settled: Sequence[int], held: Sequence[int]) -> bool:
        """Feeds the session a text; returns whether it knows all of it, so that it can draft.

        With tokens x_i, the model's state h_i goes with x_{i+1}. Pairs within `settled`, which the target has
        accepted, are observed; those with `held` tokens are supposed.
        """
        text = [*settled, *held]
        states = self._reader.states(row, text)[: len(text) - 1]
        told, sure = self._told.get(row, 0), min(len(states), len(settled) - 1)
        if told < sure:
            self._lower.observe([_news(row, text, states, told, sure)])
            self._told[row] = sure
        if len(states) > sure:
            self._lower.suppose([_news(row, text, states, sure, len(states))])
        else:
            self._lower.suppose([Accepted.of_tokens(row, [])])
        return len(states) == len(text) - 1


def _news(row: int, text: Sequence[int], states: Sequence[torch.Tensor], begin: int, end: int) -> Accepted:
    following = list(text[begin + 1 : end + 1])
    earlier = text[:1] if begin == 0 else ()
    taps, places = torch.stack(list(states[begin:end])), torch.arange(begin, end)
    return Accepted(row, following, taps, places, torch.tensor(following), earlier)
