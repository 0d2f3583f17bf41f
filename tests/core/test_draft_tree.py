"""Draft trees: structure of any tree, and the beam against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exactness import FullExpansion

from hf_hsdraft.core.draft_tree import DraftTree, TreeLimits, beam_trees, merge_trees


def tables(seed: int, depth: int, vocab: int) -> torch.Tensor:
    """`[depth, vocab, vocab]`: log-probabilities of the next token given depth and parent."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(depth, vocab, vocab, generator=generator).mul(2).log_softmax(-1)


def beams(expand, roots, vocab, depths, width, size, threshold=0.0) -> list[DraftTree]:
    limits = TreeLimits(size, width, threshold, depths)
    return beam_trees(FullExpansion(expand, max(depths)), torch.tensor(roots), torch.arange(vocab), limits)


def grow(seed: int, depth: int, vocab: int, width: int, size: int, **kwargs) -> tuple[DraftTree, torch.Tensor]:
    table = tables(seed, depth, vocab)

    def expand(level, tokens, states):
        # The state is the number of tokens read so far: proof that parents and states stay together.
        states = torch.ones(*tokens.shape, 1) if states is None else states + 1
        assert states.eq(level).all()
        return table[level - 1][tokens], states

    [tree] = beams(expand, [0], vocab, [depth], width, size, **kwargs)
    return tree, table


def assert_well_formed(tree: DraftTree) -> None:
    assert tree.parents[0] == -1 and tree.depths[0] == 0
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.scores[node] <= tree.scores[parent] + 1e-6
    siblings = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    mask = torch.tensor(tree.ancestor_mask())
    for node in range(len(tree)):
        ancestors = {node, 0, *tree.path(node)}
        assert set(torch.nonzero(mask[node]).flatten().tolist()) == ancestors


shapes = {
    "seed": st.integers(0, 10_000),
    "depth": st.integers(1, 5),
    "vocab": st.integers(2, 12),
    "width": st.integers(1, 9),
    "size": st.integers(1, 40),
}


@given(**shapes)
@settings(max_examples=60, deadline=None)
def test_beam_trees_are_well_formed_and_scored_by_their_paths(seed, depth, vocab, width, size):
    tree, table = grow(seed, depth, vocab, width, size)
    assert_well_formed(tree)
    assert len(tree) <= size + 1
    for node in range(1, len(tree)):
        tokens = [0, *(tree.tokens[step] for step in tree.path(node))]
        expected = sum(table[level][tokens[level], tokens[level + 1]] for level in range(len(tokens) - 1))
        assert tree.scores[node] == pytest.approx(float(expected), abs=1e-4)


@given(**{**shapes, "depth": st.integers(1, 3), "vocab": st.integers(2, 4)})
@settings(max_examples=30, deadline=None)
def test_an_exhaustive_beam_keeps_the_most_probable_paths(seed, depth, vocab, width, size):
    tree, table = grow(seed, depth, vocab, vocab**depth, size)
    paths = []
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            steps = itertools.pairwise((0, *tokens))
            paths.append(sum(float(table[level][a, b]) for level, (a, b) in enumerate(steps)))
    best = sorted(paths, reverse=True)[:size]
    assert sorted(tree.scores[1:], reverse=True) == pytest.approx(best, abs=1e-4)


@given(**{**shapes, "width": st.integers(2, 9)})
@settings(max_examples=30, deadline=None)
def test_siblings_are_not_limited_by_the_width(seed, depth, vocab, width, size):
    """The children of the root that are probable enough are there, however narrow the beam."""
    tree, table = grow(seed, depth, vocab, width, size)
    least = min(tree.scores[1:]) if len(tree) == size + 1 else -float("inf")
    expected = {token for token in range(vocab) if float(table[0][0, token]) > least + 1e-5}
    assert expected <= {tree.tokens[node] for node in range(1, len(tree)) if tree.depths[node] == 1}


@given(**{**shapes, "width": st.just(1)})
@settings(max_examples=20, deadline=None)
def test_width_one_is_the_greedy_chain(seed, depth, vocab, width, size):
    tree, table = grow(seed, depth, vocab, width, size)
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    token = 0
    for node in range(1, len(tree)):
        token = int(table[node - 1][token].argmax())
        assert tree.tokens[node] == token


@given(first=st.integers(0, 1000), second=st.integers(0, 1000), size=st.integers(1, 30), width=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_merging_keeps_the_best_of_both(first, second, size, width):
    a, _ = grow(first, 3, 6, width, 20)
    b, _ = grow(second, 3, 6, width, 20)
    merged = merge_trees(a, b, size)
    assert_well_formed(merged)

    def steps(tree: DraftTree) -> dict[tuple[int, ...], float]:
        """Log-probability of each path's last token after the path before it."""
        nodes = {node: tuple(tree.tokens[n] for n in tree.path(node)) for node in range(1, len(tree))}
        return {path: tree.scores[node] - tree.scores[tree.parents[node]] for node, path in nodes.items()}

    best = steps(a)
    for path, step in steps(b).items():
        best[path] = max(step, best.get(path, step))
    union = {path: sum(best[path[:length]] for length in range(1, len(path) + 1)) for path in best}
    kept = {tuple(merged.tokens[n] for n in merged.path(node)): merged.scores[node] for node in range(1, len(merged))}
    assert sorted(kept.values(), reverse=True) == pytest.approx(sorted(union.values(), reverse=True)[:size])
    for path, score in kept.items():
        assert union[path] == pytest.approx(score)


def test_trees_with_other_roots_do_not_merge():
    with pytest.raises(ValueError, match="different roots"):
        merge_trees(DraftTree.root(1), DraftTree.root(2), 4)


def test_threshold_leaves_improbable_paths_out():
    full, _ = grow(5, 4, 8, 4, 30)
    pruned, _ = grow(5, 4, 8, 4, 30, threshold=0.1)
    assert 1 < len(pruned) < len(full)
    assert min(pruned.scores) >= torch.tensor(0.1).log()
    assert_well_formed(pruned)


def test_equal_scores_keep_parents_before_children():
    """Probabilities of exactly 1 tie along the whole path."""

    def certain(level, tokens, states):
        log_probs = torch.full((*tokens.shape, 4), -torch.inf)
        log_probs[..., level % 4] = 0.0
        return log_probs, torch.zeros(*tokens.shape, 1)

    [tree] = beams(certain, [0], 4, [4], width=3, size=3)
    assert tree.tokens == (0, 1, 2, 3)
    assert tree.parents == (-1, 0, 1, 2)
