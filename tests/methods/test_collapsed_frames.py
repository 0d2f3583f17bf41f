"""Frames with a blank: their tree against an enumeration of all sequences of frames."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from hf_hsdraft.methods.specformer.collapsed_frames import CollapsedFrames
from hf_hsdraft.trees.tree_builders import TreeLimits, beam_trees

IDS = torch.tensor([4, 7, 9])  # the blank is column 3


def random_frames(rows: int, count: int, seed: int, size: int = 3) -> torch.Tensor:
    noise = torch.randn(rows, count, size + 1, generator=torch.Generator().manual_seed(seed))
    return (1.5 * noise).log_softmax(-1)


def collapsed(symbols: tuple[int, ...], blank: int) -> tuple[int, ...]:
    """The text of a sequence of frames: repeats count once, then blanks are dropped."""
    return tuple(symbol for symbol, _ in itertools.groupby(symbols) if symbol != blank)


def enumerated(frames: torch.Tensor) -> dict[tuple[int, ...], float]:
    """For each path of columns the probability that the text begins with it, by all sequences of frames."""
    count, size = frames.shape
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for symbols in itertools.product(range(size), repeat=count):
        probability = math.exp(sum(float(frames[frame, symbol]) for frame, symbol in enumerate(symbols)))
        text = collapsed(symbols, size - 1)
        for length in range(len(text) + 1):
            found[text[:length]] += probability
    return found


def nodes_of(tree) -> dict[tuple[int, ...], float]:
    ids = IDS.tolist()
    paths = {node: tuple(ids.index(tree.tokens[each]) for each in tree.path(node)) for node in range(1, len(tree))}
    return {path: tree.scores[node] for node, path in paths.items()}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_node_has_the_probability_of_all_its_sequences(count):
    """Of two texts at once. Also paths that cannot be said: a token twice in two frames leaves no room for a blank."""
    frames = random_frames(2, count, seed=count)
    expansion = CollapsedFrames(frames, IDS, count)
    limits = TreeLimits(10_000, 10_000, 0.0, [count, count])
    trees = beam_trees(expansion, torch.tensor([7, 1]), IDS, limits)
    for row, tree in enumerate(trees):
        wanted = {path: value for path, value in enumerated(frames[row]).items() if path}
        found = nodes_of(tree)
        assert not tree.fault(10)
        assert found.keys() == wanted.keys()
        for path, score in found.items():
            assert math.exp(score) == pytest.approx(wanted[path], rel=1e-4), path
    if count > 1:
        assert (0,) * count not in found


def test_a_tree_is_the_most_probable_one():
    frames = random_frames(1, 4, seed=5)
    [tree] = beam_trees(CollapsedFrames(frames, IDS, 4), torch.tensor([1]), IDS, TreeLimits(9, 100, 0.0, [4]))
    ranked = sorted((value for path, value in enumerated(frames[0]).items() if path), reverse=True)
    assert sorted(map(math.exp, tree.scores[1:]), reverse=True) == pytest.approx(ranked[:9], rel=1e-4)


def test_fewer_depths_are_asked_of_all_frames():
    frames = random_frames(1, 4, seed=6)
    [tree] = beam_trees(CollapsedFrames(frames, IDS, 2), torch.tensor([1]), IDS, TreeLimits(99, 100, 0.0, [2]))
    wanted = {path: value for path, value in enumerated(frames[0]).items() if 0 < len(path) <= 2}
    assert nodes_of(tree).keys() == wanted.keys()
    assert math.exp(nodes_of(tree)[1, 2]) == pytest.approx(wanted[1, 2], rel=1e-4)


def test_drawn_nodes_have_distributions_that_add_up():
    frames = random_frames(1, 4, seed=7)
    every = enumerated(frames[0])
    expansion = CollapsedFrames(frames, IDS, 4, normalised=True, temperature=0.7)
    state = None
    for level, path in enumerate([(), (2,), (2, 0)], 1):
        token = torch.tensor([[1 if not path else int(IDS[path[-1]])]])
        found, state = expansion(level, token, state)
        children = [every.get((*path, column), 0.0) ** (1 / 0.7) for column in range(3)]
        wanted = torch.tensor([child / sum(children) for child in children])
        assert torch.allclose(found[0, 0].exp(), wanted, rtol=1e-4)


def test_likely_columns_give_the_nodes_of_all_columns(tuned):
    frames = (3 * random_frames(2, 4, seed=8, size=60)).log_softmax(-1)  # sure enough that 25 tokens are likely
    ids, roots, limits = torch.arange(60) * 2, torch.tensor([2, 5]), TreeLimits(12, 6, 0.0, [4, 4])
    wanted = beam_trees(CollapsedFrames(frames, ids, 4), roots, ids, limits)
    tuned(likely_columns=25)
    found = beam_trees(CollapsedFrames(frames, ids, 4), roots, ids, limits)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens and one.parents == other.parents
        assert one.scores == pytest.approx(other.scores, abs=1e-5)


def test_tokens_that_cannot_be_drafted_are_followed_by_something():
    """A text may hold them where drafts are compared with training; nothing is infinite or undefined then."""
    expansion = CollapsedFrames(random_frames(1, 4, seed=9), IDS, 4)
    _, state = expansion(1, torch.tensor([[0]]), None)
    for level, token in ((2, 5), (3, 5), (4, 9)):
        found, state = expansion(level, torch.tensor([[token]]), state)
        assert not found.isnan().any() and (level == 4 or found.isfinite().all())


def test_improbable_symbols_do_no_harm():
    """A frame that rules symbols out, as far as numbers go."""
    frames = random_frames(1, 5, seed=10)
    frames[:, 1, :2] = -torch.inf
    frames[:, 3] = torch.tensor([0.0, -900.0, -900.0, -900.0])
    frames = frames.log_softmax(-1)
    expansion = CollapsedFrames(frames, IDS, 5)
    [tree] = beam_trees(expansion, torch.tensor([1]), IDS, TreeLimits(20, 100, 0.0, [5]))
    every = enumerated(frames[0])
    for path, score in nodes_of(tree).items():
        assert math.exp(score) == pytest.approx(every[path], rel=1e-4)
