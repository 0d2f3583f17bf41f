"""The builders of draft trees, by the value of the option `tree_builder`."""

from __future__ import annotations

from .p_best_trees import p_best_trees
from .sampled_trees import gumbel_trees, stochastic_beam_trees
from .tree_builders import TreeBuilder, beam_trees

TREE_BUILDERS: dict[str, TreeBuilder] = {
    "beam": beam_trees,
    "p_best": p_best_trees,
    "gumbel": gumbel_trees,
    "stochastic_beam": stochastic_beam_trees,
}
DRAWING = frozenset({"gumbel", "stochastic_beam"})  # those that draw their nodes
WHOLE = DRAWING | {"p_best"}  # those whose trees are verified as they are, as choosing among the nodes would undo them
