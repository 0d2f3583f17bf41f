"""The seam of tree building: what a builder is given, and what it returns.

A builder grows a tree for each text of a batch, level by level. It asks an `Expansion` which children the nodes may
have. It only gathers the states that the expansion returns, and hands them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..core.draft_tree import DraftTree


class Expansion:
    """What a drafter says about the children of nodes.

    A drafter whose nodes have no states, such as one that drafts all depths in one forward, returns `None` for them.

    Attributes:
        depth: greatest depth of a child.
        has_states: whether nodes have states.
    """

    depth: int
    has_states: bool = True

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the log-probabilities `[B, n, V']` of all children, and the nodes' states `[B, n, S]` or `None`.

        Log-probabilities that are the same for all nodes of a level may be `[B, 1, V']`.

        Args:
            level: depth of the children, 1 or more.
            tokens: `[B, n]`, int64, tokens of the nodes.
            states: `[B, n, S]`, states of the nodes' parents; `None` at level 1, where the node is the root.
        """
        raise NotImplementedError

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the k most probable children of all nodes, the best first. The first arguments are as above.

        They are found among all children. A drafter that knows where to look may say it more quickly.

        Args:
            scores: `[B, n]`, scores of the nodes.
            count: greatest number k of children.

        Returns:
            The children's scores `[B, k]`, the children as columns `[B, k]` of the log-probabilities, their parents
            `[B, k]` as columns of `tokens`, and the nodes' states `[B, n, S]` or `None`.
        """
        log_probs, states = self(level, tokens, states)
        totals = scores[..., None] + log_probs
        values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
        width = totals.shape[-1]
        return values, places % width, places // width, states


@dataclass(frozen=True)
class TreeLimits:
    """How large trees may be.

    Attributes:
        tree_size: greatest number of nodes besides the root.
        beam_width: number of nodes expanded at each depth; 1 gives a chain.
        threshold: least probability of a path, 0 to 1. Builders that draw their nodes ignore it.
        max_depths: greatest depth of each text.
    """

    tree_size: int
    beam_width: int
    threshold: float
    max_depths: Sequence[int]


def states_of(states: torch.Tensor | None, parents: torch.Tensor) -> torch.Tensor | None:
    """Returns the states `[B, m, S]` of some nodes, given as columns `[B, m]` of `states`; `None` if there are none."""
    if states is None:
        return None
    return states[torch.arange(len(parents), device=parents.device)[:, None], parents]


class TreeBuilder(Protocol):
    def __call__(
        self, expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits, /
    ) -> list[DraftTree]:
        """Grows a tree for each text of a batch.

        Args:
            expansion: tells which children nodes may have.
            root_tokens: `[B]`, int64, the last accepted token of each text.
            vocab_ids: `[V']`, int64, the token id of each column of the log-probabilities.
            limits: how large the trees may be.
        """
        ...
