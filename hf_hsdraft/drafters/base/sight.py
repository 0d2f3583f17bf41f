"""Attention masks of packed sequences, computed in blocks of rows of one sequence.

A mask over all tokens of a batch grows with their square, while a token sees its own sequence only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...core.tuning import TUNING

SEEN_BY_ALL = -1  # instead of a sequence number


@dataclass(frozen=True)
class Sight:
    """What each row sees: earlier positions of its sequence and its own, within a window.

    Columns are the cached positions, followed by the pairs of this forward.

    Attributes:
        rows: `[R]`, int64, column of each row's pair, the last one that it sees.
        own, texts: `[R]` and `[P]`, sequence of each row and column; columns may be `SEEN_BY_ALL`.
        at, places: `[R]` and `[P]`, position of each row and column.
        window: visible positions including the row's; None for all.
    """

    rows: torch.Tensor
    own: torch.Tensor
    texts: torch.Tensor
    at: torch.Tensor
    places: torch.Tensor
    window: int | None

    @property
    def is_large(self) -> bool:
        return len(self.rows) * len(self.texts) > TUNING.large_mask

    def mask(self, columns: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, P]`, True where a row may look; with `columns` `[C]`, `[R, C]`."""
        columns = torch.arange(len(self.texts), device=self.rows.device) if columns is None else columns
        texts, own = self.texts[columns], self.own[:, None]
        mask = (columns <= self.rows[:, None]) & ((texts == own) | (texts == SEEN_BY_ALL))
        return mask if self.window is None else mask & (self.at[:, None] - self.places[columns] < self.window)

    def of(self, rows: slice | torch.Tensor) -> Sight:
        return replace(self, rows=self.rows[rows], own=self.own[rows], at=self.at[rows])

    def ahead(self, steps: int) -> Sight:
        """The sight of drafts `steps` positions after the rows: the same columns, with the window moved on."""
        return replace(self, at=self.at + steps)

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields rows `[r]`, the columns `[c]` that any of them sees, and the mask `[r, c]`; no row comes twice."""
        for text in self.own.unique():
            columns = ((self.texts == text) | (self.texts == SEEN_BY_ALL)).nonzero().flatten()
            for block in (self.own == text).nonzero().flatten().split(TUNING.mask_rows):
                sight = self.of(block)
                seen = columns[columns <= sight.rows.max()]
                if sight.window is not None:
                    seen = seen[sight.at.min() - sight.places[seen] < sight.window]
                yield block, seen, sight.mask(seen)
