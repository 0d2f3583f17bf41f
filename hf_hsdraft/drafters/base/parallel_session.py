"""The session of drafters that draft all depths in one forward, from keys and values of what was accepted."""

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
    """Drafts trees (or chains) for the texts of a batch, all depths of all texts in one forward.

    A family says by `columns` and `read` what it keeps of accepted positions, by `drafted` what the slots are, and by
    `predicted` what they predict.

    Args:
        drafter, weights, options, rows, layers, sizes, foresight: see `ReadingSession`.
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
        """Returns the slots `[B, slots, D]` of some texts.

        Args:
            asks: what is asked for of the texts. What was pending of them has not been read yet, see `read_pending`.
            depth: number of drafts that are of use.
        """
        raise NotImplementedError

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        """Returns the logits `[B, depth, V']` of slots, and what the tokens of a path say about them.

        Args:
            hidden: `[B, slots, D]`.
            depth: number of drafts that are of use.
        """
        raise NotImplementedError

    def observe(self, news: Sequence[Accepted]) -> None:
        super().observe(news)
        if self._refiner is not None:
            for each in news:
                self._refiner.observe(each.row, [*each.earlier, *each.tokens])

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        return self.expansion_of(asks, self.drafted(asks, depth), depth, options)

    def expansion_of(self, asks: Sequence[Ask], hidden: torch.Tensor, depth: int, options: DraftOptions) -> Expansion:
        """Returns the children of the nodes of some trees, by the slots `[B, slots, D]` of the same texts."""
        logits, bias = self.predicted(hidden, depth)
        rows, temperature = [ask.row for ask in asks], options.draw_temperature
        refinement = None if self._refiner is None else self._refiner.refinement(rows)
        return ParallelExpansion(logits, bias, temperature, self.race(rows, depth), refinement=refinement)
