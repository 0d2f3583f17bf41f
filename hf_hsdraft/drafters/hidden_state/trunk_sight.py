"""What the rows of a drafter's trunk may look at, and the masks of it: of many rows, a block of one text at a time.

A mask over all the tokens of a batch grows with their square, while a token sees those of its own text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

_LARGE_MASK = 2**20  # rows times context positions, from which on rows are taken in blocks
_BLOCK = 256  # rows
SEEN_BY_ALL = -1  # in place of a text's number


@dataclass(frozen=True)
class Sight:
    """What each row sees: earlier positions of its own text, and its own, through a window.

    The context positions are what was cached, and after it the pairs of this forward.

    Attributes:
        rows: `[R]`, int64, the context position of each row's own pair; it sees none beyond.
        length: P, number of context positions.
        own: `[R]`, int64, the text that a row belongs to; `None` if all belong together.
        documents: `[P]`, the texts of the context positions, or `SEEN_BY_ALL`.
        at: `[R]`, positions of the rows in their texts; `None` if there is no window.
        places: `[P]`, the same of the context positions.
        window: positions that a row sees, its own included.
    """

    rows: torch.Tensor
    length: int
    own: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    at: torch.Tensor | None = None
    places: torch.Tensor | None = None
    window: int = 0

    @property
    def is_large(self) -> bool:
        return len(self.rows) * self.length > _LARGE_MASK

    def mask(self, columns: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, P]`, True where a row may look, or of some `columns` of it, `[C]`."""
        columns = torch.arange(self.length, device=self.rows.device) if columns is None else columns
        mask = columns <= self.rows[:, None]
        if self.own is not None and self.documents is not None:
            documents = self.documents[columns]
            mask &= (documents == self.own[:, None]) | (documents == SEEN_BY_ALL)
        if self.at is not None and self.places is not None:
            mask &= self.at[:, None] - self.places[columns] < self.window
        return mask

    def of(self, rows: slice | torch.Tensor) -> Sight:
        """That of some rows alone."""
        own = None if self.own is None else self.own[rows]
        return replace(self, rows=self.rows[rows], own=own, at=None if self.at is None else self.at[rows])

    def ahead(self, steps: int) -> Sight:
        """That of what is drafted so many positions after the rows, which sees the same through a window farther on."""
        return self if self.at is None else replace(self, at=self.at + steps)

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Rows `[r]`, columns `[c]` with all that any of them sees, and the mask `[r, c]`; each row is in one block."""
        for own, columns in self._by_text():
            for block in own.split(_BLOCK):
                sight = self.of(block)
                seen = columns[columns <= sight.rows.max()]
                if sight.at is not None and sight.places is not None:
                    seen = seen[sight.at.min() - sight.places[seen] < self.window]
                yield block, seen, sight.mask(seen)

    def _by_text(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows of each text, and the columns that belong to it."""
        every = torch.arange(self.length, device=self.rows.device)
        if self.own is None or self.documents is None:
            yield torch.arange(len(self.rows), device=self.rows.device), every
            return
        for document in self.own.unique():
            columns = every[(self.documents == document) | (self.documents == SEEN_BY_ALL)]
            yield (self.own == document).nonzero().flatten(), columns
