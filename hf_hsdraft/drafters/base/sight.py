"""What the rows of a drafter's layers may look at, and the masks of it: of many rows, a block of one text at a time.

A mask over all the tokens of a batch grows with their square, while a token sees those of its own text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...core.tuning import TUNING

SEEN_BY_ALL = -1  # in place of a text's number


@dataclass(frozen=True)
class Sight:
    """What each row sees: earlier positions of its own text, and its own, through a window.

    The columns are the positions that were held, and after them the pairs of this forward.

    Attributes:
        rows: `[R]`, int64, the column of each row's own pair; it sees none beyond.
        own, texts: `[R]` and `[P]`, the text that a row or a column belongs to; columns may be `SEEN_BY_ALL`.
        at, places: `[R]` and `[P]`, the same for positions in the texts.
        window: positions that a row sees, its own included; `None` for all.
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
        """`[R, P]`, True where a row may look, or of some `columns` of it, `[C]`."""
        columns = torch.arange(len(self.texts), device=self.rows.device) if columns is None else columns
        texts, own = self.texts[columns], self.own[:, None]
        mask = (columns <= self.rows[:, None]) & ((texts == own) | (texts == SEEN_BY_ALL))
        return mask if self.window is None else mask & (self.at[:, None] - self.places[columns] < self.window)

    def of(self, rows: slice | torch.Tensor) -> Sight:
        """That of some rows alone."""
        return replace(self, rows=self.rows[rows], own=self.own[rows], at=self.at[rows])

    def ahead(self, steps: int) -> Sight:
        """That of what is drafted so many positions after the rows, which sees the same through a window farther on."""
        return replace(self, at=self.at + steps)

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Rows `[r]`, columns `[c]` with all that any of them sees, and the mask `[r, c]`; each row is in one block."""
        for text in self.own.unique():
            columns = ((self.texts == text) | (self.texts == SEEN_BY_ALL)).nonzero().flatten()
            for block in (self.own == text).nonzero().flatten().split(TUNING.mask_rows):
                sight = self.of(block)
                seen = columns[columns <= sight.rows.max()]
                if sight.window is not None:
                    seen = seen[sight.at.min() - sight.places[seen] < sight.window]
                yield block, seen, sight.mask(seen)
