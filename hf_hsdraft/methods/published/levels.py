"""Trees that grow by a forward for each depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ...core.draft_tree import Expansion, TreeBatch, best_children
from ...core.tuning import LIKELY_COLUMNS
from ...drafters.base.tree_session import log_probs_of
from ...verify.foresight import Race

# Takes arguments of an `Expansion`; returns the children's logits `[B, n, V']` and the nodes' states `[B, n, S]`.
Levels = Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LevelExpansion(Expansion):
    """Expands nodes level by level, one forward each."""

    levels: Levels
    depth: int  # greatest depth of a child
    temperature: float  # of the returned distributions
    race: Race | None  # with foreseen target draws; probabilities are then those of winning the race

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = self.levels(level, tokens, states)
        return log_probs_of(level, logits, self.temperature, self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As in `Expansion`; races sort, so they run among the likely tokens of each row only."""
        logits, states = self.levels(level, tokens, states)
        if self.race is None or logits.shape[-1] < 2 * LIKELY_COLUMNS:
            return *best_children(log_probs_of(level, logits, self.temperature, self.race), scores, count), states
        columns = logits.amax(dim=1).topk(LIKELY_COLUMNS, sorted=False).indices
        logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
        values, found, parents = best_children(self.race.among(columns)(level, logits), scores, count)
        return values, columns.gather(1, found), parents, states


def further_nodes(
    batch: TreeBatch | None, tokens: torch.Tensor, depths: torch.Tensor, parents: torch.Tensor | None
) -> tuple[TreeBatch, torch.Tensor]:
    """Returns a batch with further nodes `[B, n]` below the columns `parents`, likewise, and their columns `[B, n]`.

    Both `batch` and `parents` are None for the first nodes.
    """
    rows, count = tokens.shape
    ancestors = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
    if batch is not None and parents is not None:
        above = batch.ancestors.gather(1, parents[..., None].expand(-1, -1, batch.tokens.shape[1]))
        ancestors = torch.cat([pad(batch.ancestors, (0, count)), torch.cat([above, ancestors], dim=2)], dim=1)
        tokens, depths = torch.cat([batch.tokens, tokens], 1), torch.cat([batch.depths, depths], 1)
    size = tokens.shape[1]
    columns = torch.arange(size - count, size, device=tokens.device).expand(rows, -1)
    return TreeBatch(tokens, depths, ancestors), columns
