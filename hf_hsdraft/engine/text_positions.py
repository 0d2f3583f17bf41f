"""Where the texts of a call are: the positions of their tokens, padding not counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.target_limits import furthest_read
from ..runtime.target_runtime import TargetRuntime


@dataclass
class TextPositions:
    """Positions of the texts of a batch.

    Attributes:
        prompt: `[B, n]`, int64, positions of the prompts' taps.
        real: `[B, n]`, bool, which of them are no padding.
        roots: position of each text's last token.
        ahead: by how much the target's own position of that token is greater: a caller's `position_ids` may say so.
    """

    prompt: torch.Tensor
    real: torch.Tensor
    roots: list[int]
    ahead: list[int]

    @classmethod
    def of(cls, runtime: TargetRuntime, tapped: int, batch_size: int) -> TextPositions:
        """After the prompts' forward, which gave taps of the last `tapped` positions."""
        real = runtime.rows.attended
        if real is None:
            real = torch.ones(batch_size, runtime.length, dtype=torch.bool)
        real = real.clone()
        real[:, -1] = True  # also of a prompt padded at the right: the first token was chosen there
        positions, roots = (real.long().cumsum(1) - 1).clamp(min=0), real.sum(dim=1).tolist()
        own = runtime.rows.next_positions or roots
        ahead = [position - root for position, root in zip(own, roots, strict=True)]
        return cls(positions[:, -tapped:], real[:, -tapped:], roots, ahead)

    def of_root(self, row: int) -> set[int]:
        """Where a text's last token is: by its length and by the target's own positions, which both may have limits."""
        return {self.roots[row], self.roots[row] + self.ahead[row]}

    def furthest(self) -> int:
        """The greatest position of a text's last token."""
        return max(max(self.of_root(row)) for row in range(len(self.roots)))

    def reach(self, target: Any) -> list[int]:
        """For each text, how far beyond its last token a forward may read."""
        rows = range(len(self.roots))
        return [min(furthest_read(target, at) - at for at in self.of_root(row)) for row in rows]
