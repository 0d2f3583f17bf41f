"""The builders of draft trees, by the value of the option `tree_builder`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.draft_tree import DraftTree
from ..core.methods import Registry
from .sampled_trees import gumbel_trees, stochastic_beam_trees
from .tree_builders import Expansion, TreeBuilder, TreeLimits, beam_trees


@dataclass(frozen=True)
class Builder(TreeBuilder):
    """A function that grows trees, with properties of its trees."""

    grow: TreeBuilder
    draws: bool = False  # whether the nodes are drawn
    whole: bool = False  # whether choosing a tree's best nodes would undo what it grows

    def __call__(
        self, expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits, /
    ) -> list[DraftTree]:
        return self.grow(expansion, root_tokens, vocab_ids, limits)


TREE_BUILDERS: Registry[Builder] = Registry(
    "tree_builder",
    {
        "beam": Builder(beam_trees),
        "gumbel": Builder(gumbel_trees, draws=True),
        "stochastic_beam": Builder(stochastic_beam_trees, draws=True),
    },
)
