"""Texts that a steered language model reads, each token with what the target had computed before it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...drafters.language_model.lm_texts import LMTexts
from ...runtime.target_forwards import TargetOutput
from .steering import Steering


@dataclass(frozen=True)
class KnownVectors:
    """The latest steering vectors of a text: `[m, D]`, of consecutive positions up to `end`."""

    vectors: torch.Tensor
    end: int

    def then(self, further: torch.Tensor, end: int, kept: int) -> KnownVectors:
        """Returns the vectors extended by `[n, D]` up to position `end`, at most the last `kept`."""
        known = torch.cat([self.vectors, further]) if self.end + len(further) == end else further
        return KnownVectors(known[max(len(known) - kept, 0) :], end)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the vectors `[n, D]` at positions `[n]`: the last one beyond the end, zeros where none is known."""
        places = positions.clamp(max=self.end) - (self.end - len(self.vectors) + 1)
        padded = torch.cat([self.vectors.new_zeros(1, self.vectors.shape[1]), self.vectors])
        return padded[(places + 1).clamp(min=0).to(padded.device)]


class SteeredTexts(LMTexts):
    """Reads an accepted token with the vector of the position before it, so that the cache depends on the text alone.

    Drafted tokens share the vector of the last verified position, with which the round's root is read. The steering is
    not kept alive. `known`, the vectors of each row, is replaced by the session.
    """

    def __init__(
        self,
        steering: Steering,
        known: Mapping[int, KnownVectors],
        model: Any,
        rows: Sequence[int],
        kinds: Any,
        most_drafted: int,
    ) -> None:
        super().__init__(model, rows, kinds, most_drafted)
        self.known = known
        self._steering_reference = weakref.ref(steering)
        self._of_round: torch.Tensor | None = None

    def keep(self, rows: Sequence[int]) -> None:
        self._of_round = None  # set again in the next round
        super().keep(rows)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, masks: Any, wanted: int, taps: Sequence[int]
    ) -> TargetOutput:
        steering: Any = self._steering_reference()
        if self._drafted is None:
            before = zip(self.rows, positions - 1, strict=True)
            deltas = steering.deltas(torch.stack([self.known[row].at(each) for row, each in before]))
            self._of_round = deltas[:, -1:]
        else:
            assert self._of_round is not None
            deltas = self._of_round
        with steering.applied(deltas):
            return super()._forward(ids, positions, masks, wanted, taps)
