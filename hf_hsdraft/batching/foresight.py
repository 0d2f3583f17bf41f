"""The coming draws of the texts of a running batch: each has its own random numbers and warpers, or draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..verify.foresight import Foresight, Race


class BatchForesight:
    """What drafts may know of coming draws, as `verify.foresight.Foresight`; `texts.at` are the texts by row."""

    def __init__(self, texts: Any, vocab_size: int) -> None:
        self._texts, self.vocab_size = texts, vocab_size

    def _of(self, row: int) -> Foresight | None:
        found: Foresight | None = self._texts.at[row].decoded.foresight
        return None if found is None or not found.draws[0].foreseeable else found

    @property
    def warper_names(self) -> tuple[str, ...]:
        """The cost of drafting depends on them."""
        found = (text.decoded.foresight for text in self._texts.at.values())
        return tuple(sorted({name for each in found if each is not None for name in each.warper_names}))

    def race(self, rows: Sequence[int], depth: int, vocab_ids: torch.Tensor) -> Any:
        """Returns the races of the next `depth` draws of each row; None if no row draws what can be foreseen."""
        known = [self._of(row) for row in rows]
        races = [None if each is None else each.race([0], depth, vocab_ids) for each in known]
        return BatchRace(races, vocab_ids) if any(each is not None for each in races) else None

    def scored(self, trees: Mapping[int, DraftTree]) -> dict[int, DraftTree]:
        """Returns the trees with scores that take the coming draws into account."""
        known = {row: self._of(row) for row in trees}
        return {row: tree if (own := known[row]) is None else own.scored({0: tree})[0] for row, tree in trees.items()}


@dataclass(frozen=True)
class BatchRace:
    """The races of several texts; None for texts that take the most probable tokens."""

    races: Sequence[Race | None]
    vocab_ids: torch.Tensor  # `[V']`, or `[B, V']` by row

    def among(self, columns: torch.Tensor) -> BatchRace:
        """Returns the races among some columns only: `[C]`, or `[B, C]` for each row."""
        by_row = columns.expand(len(self.races), -1)
        races = [None if race is None else race.among(own) for race, own in zip(self.races, by_row, strict=True)]
        return BatchRace(races, self.vocab_ids[columns])

    def __call__(self, level: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities `[B, n, V']` that tokens are drawn, or chosen, at depth `level`."""
        parts = zip(self.races, logits.float().split(1), strict=True)
        return torch.cat([own.log_softmax(dim=-1) if race is None else race(level, own) for race, own in parts])
