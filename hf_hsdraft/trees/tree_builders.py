"""The builders of draft trees, by the name of the option `tree_builder`.

A builder grows a tree for each text of a batch out of what a drafter says about children: it asks an `Expansion` level
by level. The states that it hands back are opaque to it: it only gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .draft_tree import DraftTree, build_beam_trees
from .sampled_trees import branching_for, build_gumbel_trees, build_stochastic_beam_trees


class Expansion(Protocol):
    """What a drafter says about the children of nodes, up to a depth.

    Attributes:
        depth: greatest depth of a child.
    """

    @property
    def depth(self) -> int: ...

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Expand`."""
        ...

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `BestChildren`."""
        ...


@dataclass(frozen=True)
class TreeLimits:
    """How large trees may be.

    Attributes:
        tree_size: number of nodes beside the root.
        beam_width: number of nodes expanded at a depth; 1 gives a chain.
        threshold: paths less probable than this are left out, where nodes are not drawn; 0 to 1.
        max_depths: greatest depth of each text.
    """

    tree_size: int
    beam_width: int
    threshold: float
    max_depths: Sequence[int]


class TreeBuilder(Protocol):
    """Grows a tree for each text."""

    def __call__(
        self, expand: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
    ) -> list[DraftTree]:
        """
        Args:
            root_tokens: `[B]`, int64, the last accepted token of each text.
            vocab_ids: `[V']`, int64, token ids behind the columns of `expand`.
        """
        ...


def beam(expand: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits) -> list[DraftTree]:
    """The most probable nodes, see `build_beam_trees`."""
    return build_beam_trees(
        expand.best,
        root_tokens,
        depth=expand.depth,
        beam_width=limits.beam_width,
        tree_size=limits.tree_size,
        threshold=limits.threshold,
        max_depths=limits.max_depths,
    )


def gumbel(
    expand: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Drawn nodes, as many children for every node of a depth, see `build_gumbel_trees`."""
    branching = branching_for(expand.depth, limits.tree_size)
    return build_gumbel_trees(expand, root_tokens, vocab_ids, branching=branching, max_depths=limits.max_depths)


def stochastic_beam(
    expand: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Drawn paths, see `build_stochastic_beam_trees`."""
    width = min(limits.beam_width, limits.tree_size)
    depth = min(expand.depth, limits.tree_size // width)
    return build_stochastic_beam_trees(
        expand, root_tokens, vocab_ids, depth=depth, beam_width=width, max_depths=limits.max_depths
    )


TREE_BUILDERS: dict[str, TreeBuilder] = {"beam": beam, "gumbel": gumbel, "stochastic_beam": stochastic_beam}
