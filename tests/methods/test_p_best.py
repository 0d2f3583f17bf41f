"""Trees of the best whole paths, compared with all paths there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import as_plain
from oracles.exactness import FullExpansion

from hf_hsdraft.core.draft_tree import TreeLimits, beam_trees
from hf_hsdraft.methods.refinement.refinement import p_best_trees

TOKENS, DEPTH = 5, 4


class Lattice:
    """Tokens of each depth with probabilities of their own, times a model of two tokens before each."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.depths = torch.randn(DEPTH, TOKENS, generator=generator)
        self.model = torch.randn(TOKENS, TOKENS, TOKENS, generator=generator)

    def log_probs(self, level: int, before: int, last: int) -> torch.Tensor:
        return (self.depths[level - 1] + self.model[before, last]).log_softmax(-1)

    def expansion(self) -> FullExpansion:
        def expand(level, tokens, states):
            before = torch.zeros_like(tokens) if states is None else states[..., 0].long()
            rows = [
                torch.stack([self.log_probs(level, int(b), int(t)) for b, t in zip(row_b, row_t, strict=True)])
                for row_b, row_t in zip(before, tokens, strict=True)
            ]
            return torch.stack(rows), tokens[..., None].float()  # what children know: the token before their parent

        return FullExpansion(expand, DEPTH)

    def score(self, root: int, path: tuple[int, ...]) -> float:
        text = (0, root, *path)
        return sum(
            float(self.log_probs(level, text[level - 1], text[level])[token]) for level, token in enumerate(path, 1)
        )


def paths_of(tree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[n] for n in tree.path(node)): tree.scores[node] for node in range(1, len(tree))}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [3, 11, 40])
def test_the_tree_is_that_of_the_best_of_all_paths(seed, size):
    """With room for every path of the search, it is what enumerating all of them gives."""
    lattice, roots = Lattice(seed), torch.tensor([1, 3, 4])
    limits = TreeLimits(size, TOKENS**DEPTH, 0.0, [DEPTH, DEPTH, 2])
    # As many children of a depth are found as may stay, so a wide search needs a large tree: this one is cut below.
    trees = p_best_trees(lattice.expansion(), roots, torch.arange(TOKENS), TreeLimits(TOKENS**DEPTH, *vars_of(limits)))
    small = p_best_trees(lattice.expansion(), roots, torch.arange(TOKENS), limits)
    for root, depth, tree, cut in zip(roots.tolist(), limits.max_depths, trees, small, strict=True):
        ranked = sorted(itertools.product(range(TOKENS), repeat=depth), key=lambda path: -lattice.score(root, path))
        wanted: list[tuple[int, ...]] = []
        for path in ranked:
            wanted += [path[:end] for end in range(1, depth + 1) if path[:end] not in wanted]
        found = list(paths_of(tree))
        assert found == wanted[: len(found)] and len(found) == min(len(wanted), TOKENS**DEPTH)
        for path, score in paths_of(tree).items():
            assert score == pytest.approx(lattice.score(root, path), abs=1e-4)
        assert not tree.fault(TOKENS) and not cut.fault(TOKENS) and len(cut) == min(size, len(wanted)) + 1
        best = max(paths_of(cut), key=lambda path: (len(path), paths_of(cut)[path]))
        assert size < depth or len(best) == depth


def vars_of(limits: TreeLimits) -> tuple:
    return limits.beam_width, limits.threshold, limits.max_depths


def test_the_best_path_need_not_begin_with_the_best_node():
    """The best nodes lead nowhere here: a beam would keep them, whole paths do not go through them."""
    first, second = torch.tensor([0.4, 0.3, 0.3]).log(), torch.full((3, 3), 1 / 3).log()
    second[1] = torch.tensor([0.98, 0.01, 0.01]).log()

    def expand(level, tokens, states):
        known = first.expand(*tokens.shape, 3) if level == 1 else second[tokens]
        return known, torch.zeros(*tokens.shape, 1)

    expansion, root, ids = FullExpansion(expand, 2), torch.tensor([0]), torch.arange(3)
    [whole] = p_best_trees(expansion, root, ids, TreeLimits(2, 3, 0.0, [2]))
    [nodes] = beam_trees(expansion, root, ids, TreeLimits(2, 3, 0.0, [2]))
    assert whole.tokens == (0, 1, 0) and whole.parents == (-1, 0, 1)
    assert set(nodes.tokens[1:]) == {0, 1} and max(nodes.depths) == 1


def test_chains_and_thresholds():
    lattice, roots, ids = Lattice(0), torch.tensor([1, 2]), torch.arange(TOKENS)
    for tree in p_best_trees(lattice.expansion(), roots, ids, TreeLimits(9, 1, 0.0, [DEPTH, 3])):
        assert tree.parents == tuple(range(-1, len(tree) - 1))
    for tree in p_best_trees(lattice.expansion(), roots, ids, TreeLimits(30, 9, 0.05, [DEPTH, 3])):
        assert len(tree) > 1 and min(tree.scores) >= torch.tensor(0.05).log()


def test_trees_of_a_call_stay_as_they_were_built(target, drafter, prompt):
    """Sizes by cost would keep the most probable nodes of a tree, which need not be those of whole paths."""
    options = drafter.generation_config
    options.tree_builder, options.ngram_length, options.node_cost, options.depth_cost = "p_best", 0, 0.5, 0.0
    sizes = []
    for sizing in ("cost", "fixed"):
        options.tree_sizing = sizing
        sizes.append(as_plain(target, drafter, prompt, max_new_tokens=12).statistics.drafted_nodes)
    assert sizes[0] == sizes[1]
