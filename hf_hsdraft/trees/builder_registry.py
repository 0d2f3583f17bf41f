"""The builders of draft trees, by the value of the option `tree_builder`."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.methods import Registry
from .sampled_trees import gumbel_trees, stochastic_beam_trees
from .tree_builders import TreeBuilder, beam_trees


@dataclass(frozen=True)
class Builder:
    """A function that grows trees, with properties of its trees."""

    grow: TreeBuilder
    draws: bool = False  # whether the nodes are drawn
    whole: bool = False  # whether choosing a tree's best nodes would undo what it grows


TREE_BUILDERS: Registry[Builder] = Registry(
    "tree_builder",
    {
        "beam": Builder(beam_trees),
        "gumbel": Builder(gumbel_trees, draws=True),
        "stochastic_beam": Builder(stochastic_beam_trees, draws=True),
    },
)
