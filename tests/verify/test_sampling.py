"""Sampled texts are distributed as the target's own; the same test finds a biased verifier."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import exactness
from oracles.exactness import DRAFTED, Table, cascaded, check, chi_square, grow
from oracles.exactness import settings as all_settings
from small_target import small_target

from hf_hsdraft.methods.drawn import Rejection, branching_for

# A rule sees the scores of a text, whatever made them: all texts are possible, or some tokens are left out.
SETTINGS = [*all_settings(("repetition",), (1.5,)), *all_settings(("top_p",), (0.5,))]
SAMPLES = 2000


@pytest.mark.parametrize(("verifier", "builder", "processor", "temperature"), SETTINGS)
def test_one_round_is_distributed_as_the_target(verifier, builder, processor, temperature):
    assert check(verifier, builder, processor, temperature, SAMPLES).p_value > 1e-4


def test_rejection_accepts_more_than_the_walk_at_high_temperature():
    walk, rejection = (check(name, "gumbel", "none", 1.5, SAMPLES) for name in ("walk", "rejection"))
    assert rejection.accepted > 1.3 * walk.accepted


def test_a_biased_verifier_is_found():
    """Ratios with a distribution that the nodes were not drawn from, as with a beam's."""

    class Biased(Rejection):
        def judge(self, tree, nodes):
            flat = torch.full((DRAFTED,), 1 / DRAFTED).log()
            return super().judge(replace(tree, log_probs=(flat,) * len(tree), vocab_ids=torch.arange(DRAFTED)), nodes)

    assert check(Biased(), "beam", "none", 1.0, SAMPLES).p_value < 1e-6


def test_a_middle_model_that_drew_by_another_distribution_is_found(monkeypatch):
    """The chain of a cascade, drawn at one temperature, with the distributions of another one."""

    def biased(table):
        tree = cascaded(table)
        told = [None if each is None else (0.3 * each).log_softmax(-1) for each in tree.log_probs]
        return replace(tree, log_probs=tuple(told))

    monkeypatch.setitem(exactness.DRAWN_DRAFTS, "cascade", biased)
    assert check("rejection", "cascade", "none", 1.0, SAMPLES).p_value < 1e-6


def test_the_chi_square_is_the_textbook_one():
    exact = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert chi_square(Counter({(0,): 20, (1,): 30, (2,): 50}), exact) == pytest.approx(1.0)
    # (30 - 20)^2 / 20 + 0 + (40 - 50)^2 / 50 = 7 with two degrees of freedom: exp(-3.5)
    assert chi_square(Counter({(0,): 30, (1,): 30, (2,): 40}), exact) == pytest.approx(0.0301974, abs=1e-6)
    assert chi_square(Counter({(0,): 1}), torch.tensor([0.0, 1.0], dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("builder", ["gumbel", "stochastic_beam"])
def test_siblings_are_draws_without_replacement(builder):
    """The first child of the root is a draw from q; the second one from q without the first."""
    table = Table("none", 1.0)
    q = table.drafts[0][0].exp().double()
    firsts: Counter[tuple[int, ...]] = Counter()
    pairs: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(0)
    for tree in grow(builder, table, 3000):
        children = [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]
        assert len(set(children)) == len(children)
        firsts[(children[0],)] += 1
        if builder == "gumbel":
            pairs[tuple(children[:2])] += 1
    assert chi_square(firsts, q) > 1e-4
    if pairs:
        joint = q[:, None] * q[None, :] / (1 - q[:, None])
        joint.fill_diagonal_(0.0)
        assert chi_square(pairs, joint) > 1e-4


@given(depth=st.integers(1, 8), size=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_branching_uses_the_nodes_it_may(depth, size):
    branching = branching_for(depth, size)
    assert len(branching) == min(depth, size) and min(branching) >= 1
    assert sum(torch.tensor(branching).cumprod(0).tolist()) <= size
    assert list(branching) == sorted(branching, reverse=True)


@pytest.mark.parametrize("verification", ["walk", "rejection"])
def test_a_seed_gives_the_same_text_again(verification):
    small = small_target()
    drafter = make_drafter(small, draft_vocab_size=5, num_draft_steps=3, tree_size=8, draft_vocab_ids=[0, 1, 2, 3, 4])
    drafter.generation_config.verification, drafter.generation_config.tree_builder = verification, "gumbel"
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        prompt = torch.tensor([[1, 2, 3]])
        texts.append(small.generate(prompt, do_sample=True, max_new_tokens=12, assistant_model=drafter).tolist())
    assert texts[0] == texts[1] != texts[2]
