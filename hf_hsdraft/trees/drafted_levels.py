"""Drafted nodes of trees that grow a depth at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .tree_masks import TreeBatch


@dataclass(frozen=True)
class DraftedLevels:
    """Nodes in the order of reading, depth by depth."""

    batch: TreeBatch  # the first level has depth 0
    is_chain: bool = True  # whether no level has more than one node

    @classmethod
    def nothing(cls, tokens: torch.Tensor) -> DraftedLevels:
        """Returns levels without nodes, for the rows of tokens `[B, n]`, on their device."""
        none = tokens[:, :0]
        return cls(TreeBatch(none, none, none.bool()[:, :, None][:, :, :0]))

    @property
    def count(self) -> int:
        return self.batch.tokens.shape[1]

    def with_level(self, tokens: torch.Tensor, paths: torch.Tensor) -> DraftedLevels:
        """Adds nodes `[B, n]` after ancestors `[B, n, depth]`, given as columns."""
        before, (rows, count) = self.batch, tokens.shape
        depths = torch.full_like(tokens, paths.shape[2])
        seen = torch.zeros(rows, count, self.count, dtype=torch.bool, device=tokens.device).scatter_(2, paths, True)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        ancestors = torch.cat([pad(before.ancestors, (0, count)), torch.cat([seen, own], dim=2)], dim=1)
        batch = TreeBatch(torch.cat([before.tokens, tokens], 1), torch.cat([before.depths, depths], 1), ancestors)
        return DraftedLevels(batch, self.is_chain and count == 1)

    def own_columns(self, count: int) -> torch.Tensor:
        """Returns the columns `[B, count, 1]` of the last `count` nodes."""
        rows, device = len(self.batch.tokens), self.batch.tokens.device
        return torch.arange(self.count - count, self.count, device=device)[None, :, None].expand(rows, -1, -1)
