"""Drafts by one function of fixed shapes, compared with those of the growing session, and acceptance in tensors."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from oracles.device_reads import host_reads

from hf_hsdraft.core.draft_tree import DraftTree, TreeBatch
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.hidden_state.draft_session import HSDraftSession
from hf_hsdraft.drafters.hidden_state.quick_weights import QuickWeights
from hf_hsdraft.methods.lossy.continuation import extended, likeliest_path
from hf_hsdraft.methods.static_roll_out import StaticRollOut, StaticSession, Verified, chosen_path, keep_in_place
from hf_hsdraft.verify.verdict import walk

STEPS, SIZE = 4, 24


def random_tree(rng: random.Random, nodes: int, vocab: int = 4) -> DraftTree:
    """A tree with few tokens, so that paths are long and siblings many."""
    tokens, parents, depths, taken = [rng.randrange(vocab)], [-1], [0], set()
    while len(tokens) <= nodes:
        parent, token = rng.randrange(len(tokens)), rng.randrange(vocab)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(-float(depth) for depth in depths))


def verified(tree: DraftTree, choices: list[int], taps: torch.Tensor, position: int) -> Verified:
    """As a forward leaves it, padded to `SIZE` nodes besides the root."""
    batch = TreeBatch.of([tree], torch.device("cpu"), SIZE + 1)
    padding = SIZE + 1 - len(tree)
    rows = torch.cat([taps, torch.full((padding, taps.shape[1]), torch.inf)])
    padded = torch.tensor([*choices, *[choices[0]] * padding])
    return Verified(batch.tokens[0], batch.depths[0], batch.ancestors[0], padded, rows, position)


def follow(session: StaticSession, forward: Verified) -> list[int] | None:
    batch = TreeBatch(forward.tokens[None], forward.depths[None], forward.ancestors[None])
    return session.follow(batch, forward.choices, forward.taps, forward.position)


def test_tensors_kept_in_place_are_found_beside_operators():
    weight, inner = torch.zeros(2), torch.zeros(3)
    torch.ops.aten.add.default  # noqa: B018 from now on the namespace has objects that refer to themselves
    part = SimpleNamespace(operators=torch.ops.aten, weight=weight, call=lambda x: x + inner)
    keep_in_place([part], part.call)
    assert weight._dynamo_static_input_type == inner._dynamo_static_input_type == "unguarded"


@pytest.mark.parametrize("seed", range(60))
def test_the_path_in_tensors_is_the_walk(seed):
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randrange(SIZE + 1))
    choices = [rng.randrange(4) for _ in tree.tokens]
    verdict = walk(tree, lambda node, tokens: choices[node], lambda path, tokens: False)
    given = verified(tree, choices, torch.zeros(len(tree), 1), 0)
    for columns in (1, 3, SIZE + 1):
        with host_reads() as seen:
            path, count = chosen_path(given.choices, given.tokens, given.depths, given.ancestors, columns)
        assert not seen and path.shape == (columns,) and count.shape == (1,)
        kept = [0, *verdict.path][:columns]
        assert int(count) == len(kept) and path.tolist() == kept + [0] * (columns - len(kept))


class Pair:
    """A growing session and one of fixed shapes, which get the same news."""

    def __init__(self, **fields) -> None:
        target = make_target()
        drafter = make_drafter(target, tree_size=SIZE, num_draft_steps=STEPS, **fields)
        modules = target.get_input_embeddings(), target.get_output_embeddings()
        weights, call = drafter.borrow(*modules), Call(target, 1, DraftOptions.of(drafter))
        working = QuickWeights.of(drafter, weights.head)
        self.width, self.taps = call.options.beam_width, len(drafter.config.target_tap_layers) * 32
        self.growing = HSDraftSession(drafter, weights, call, working)
        roll_out = StaticRollOut(working, drafter, 200, STEPS)
        roll_out.begin(weights)
        self.static = StaticSession(drafter, weights, call, working, roll_out)
        self.position, self.root = 0, 5
        generator = torch.Generator().manual_seed(0)
        self.observe(torch.randn(9, self.taps, generator=generator), [*range(2, 10), self.root])

    def observe(self, taps: torch.Tensor, tokens: list[int]) -> None:
        places = torch.arange(self.position, self.position + len(tokens))
        for session in (self.growing, self.static):
            session.observe([Accepted(0, tokens, taps, places, torch.tensor(tokens))])
        self.position, self.root = self.position + len(tokens), tokens[-1]

    def drafted(self, depth: int, width: int = 0) -> DraftTree:
        """The tree of fixed shapes, which has to be that of the growing session."""
        ask = Ask(0, self.root, depth, SIZE, width or self.width)
        [expected], [found] = self.growing.draft([ask]), self.static.draft([ask])
        assert (found.tokens, found.parents, found.depths) == (expected.tokens, expected.parents, expected.depths)
        assert found.scores == pytest.approx(expected.scores, abs=5e-3)
        return found


FIELDS = ({}, {"sliding_window": 7, "injector": "path"}, {"num_hidden_layers": 2, "num_step_modules": 2})


@torch.no_grad()
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("width", [0, 1])
def test_drafts_are_those_of_the_growing_session(fields, width):
    """Whether they follow a forward or not, whatever is accepted, also less or more than a draft that follows reads."""
    pair, rng = Pair(**fields), random.Random(1)
    generator, followed = torch.Generator().manual_seed(2), 0
    for number in range(24):
        tree = pair.drafted(rng.choice([STEPS, STEPS, 1, 2]), width)
        if number % 6 == 5:  # n-grams in front may reach deeper
            tree = extended(tree, likeliest_path(tree)[-1], [(token, 0.5) for token in range(20, 26)])
            tree = tree.part({0, *tree.path(len(tree) - 1)})
        end = len(tree) - 1 if number % 6 == 5 else rng.randrange(len(tree))
        path = [0, *tree.path(end)]
        choices = [VOCAB - 1] * len(tree)  # in no draft here
        for node, following in pairwise(path):
            choices[node] = tree.tokens[following]
        taps = torch.randn(len(tree), pair.taps, generator=generator)
        if number % 4:
            forward = verified(tree, choices, taps, pair.position)
            assert follow(pair.static, forward) == forward.choices.tolist()
        tokens = [choices[node] for node in path]
        kept = 1 if number % 7 == 6 else len(tokens)  # a text may be cut
        before = pair.static._roll_out._text.length
        pair.observe(taps[path[:kept]], tokens[:kept])
        followed += pair.static._roll_out._text.length > before
    assert followed > 6
    torch.testing.assert_close(pair.static.saved(), pair.growing.saved(), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_a_round_without_a_draft_is_not_followed():
    pair = Pair()
    tree = pair.drafted(STEPS)
    pair.observe(torch.randn(1, pair.taps, generator=torch.Generator().manual_seed(1)), [3])  # zeros make a near tie
    forward = verified(tree, [1] * len(tree), torch.zeros(len(tree), pair.taps), pair.position)
    assert follow(pair.static, forward) is None
    pair.drafted(STEPS)
    assert follow(pair.static, replace(forward, position=pair.position)) is not None


@torch.no_grad()
def test_other_sizes_than_the_draft_that_followed_has():
    """The target reads chains from here on: this round drafts nothing, the next one a chain."""
    pair = Pair()
    tree = pair.drafted(STEPS)
    choices = [VOCAB - 1] * len(tree)
    taps = torch.zeros(len(tree), pair.taps)
    follow(pair.static, verified(tree, choices, taps, pair.position))
    pair.observe(taps[:1], choices[:1])
    ask = Ask(0, pair.root, STEPS, SIZE, 1)
    assert len(pair.static.draft([ask])[0]) == 1 < len(pair.growing.draft([ask])[0])
    pair.observe(taps[:1], [4])
    pair.drafted(STEPS, width=1)


@torch.no_grad()
def test_what_needs_states_takes_them_from_the_roll_out():
    """Somebody listens to expansions; then nothing is followed."""
    pair, seen = Pair(), []
    pair.static.on_expansion = lambda rows, expansion: seen.append(expansion.depth)
    tree = pair.drafted(STEPS)
    forward = verified(tree, [1] * len(tree), torch.zeros(len(tree), pair.taps), pair.position)
    assert seen == [STEPS] and follow(pair.static, forward) is None
