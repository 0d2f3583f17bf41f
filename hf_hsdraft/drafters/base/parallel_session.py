"""Session of drafters that draft all depths in one forward from cached keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...trees.tree_builders import Expansion
from ...verify.foresight import Foresight
from .decoder_layer import LayerSizes
from .draft_options import DraftOptions
from .parallel_expansion import ParallelExpansion, TokenBias
from .protocol import Accepted, Ask
from .refiners import refiner_of
from .target_weights import TargetWeights
from .tree_session import ReadingSession


class ParallelSession(ReadingSession):
    """Drafts trees (or chains) for a batch, all depths of all sequences in one forward.

    Families implement `columns` and `read` for accepted positions, `drafted` for the slots, and `predicted` for their
    logits. Arguments as in `ReadingSession`.
    """

    def __init__(
        self,
        drafter: Any,
        weights: TargetWeights,
        options: DraftOptions,
        rows: int,
        layers: int,
        sizes: LayerSizes,
        foresight: Foresight | None = None,
    ) -> None:
        super().__init__(drafter, weights, options, rows, layers, sizes, foresight)
        self._refiner = refiner_of(drafter, options, weights, rows)

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` for `depth` drafts; must call `read_pending` first."""
        raise NotImplementedError

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        """Returns the logits `[B, depth, V']` of slots `[B, slots, D]`, and the bias of the path's tokens."""
        raise NotImplementedError

    def observe(self, news: Sequence[Accepted]) -> None:
        super().observe(news)
        if self._refiner is not None:
            for each in news:
                self._refiner.observe(each.row, [*each.earlier, *each.tokens])

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        return self.expansion_of(asks, self.drafted(asks, depth), depth, options)

    def expansion_of(self, asks: Sequence[Ask], hidden: torch.Tensor, depth: int, options: DraftOptions) -> Expansion:
        """As `expansion`, from given slots `[B, slots, D]`."""
        logits, bias = self.predicted(hidden, depth)
        rows, temperature = [ask.row for ask in asks], options.temperature
        refinement = None if self._refiner is None else self._refiner.refinement(rows)
        return ParallelExpansion(logits, bias, temperature, self.race(rows, depth), refinement=refinement)
