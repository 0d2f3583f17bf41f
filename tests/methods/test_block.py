"""Block drafters: heads, trees of parallel drafts, and configuration. `test_family_contract` has what all promise."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import VOCAB, as_plain
from family_helpers import make_block_drafter, session_of
from oracles.exactness import FullExpansion
from oracles.format_parity import randomise
from session_helpers import news

from hf_hsdraft.core.draft_tree import TreeLimits, beam_trees
from hf_hsdraft.drafters.base.protocol import Ask
from hf_hsdraft.drafters.base.tree_session import ParallelExpansion
from hf_hsdraft.methods.best_first import best_first_trees
from hf_hsdraft.methods.block.configuration import BlockConfig, Sight
from hf_hsdraft.methods.block.drafter import BlockConvolution, BlockDrafter
from hf_hsdraft.methods.block.heads import CandidateSelector, MarkovHead
from hf_hsdraft.methods.block.session import BlockBias

# --- heads -----------------------------------------------------------------------------------------------------------


def test_a_selector_chooses_among_the_best_only():
    logits = torch.tensor([[1.0, 5.0, 2.0, 4.0, 3.0]])
    kept = CandidateSelector(5, 6, 2, 3).keep_candidates(logits)
    assert kept.tolist() == [[-math.inf, 5.0, -math.inf, 4.0, 3.0]]


def test_fresh_convolutions_change_nothing():
    convolution, x = BlockConvolution(8, 3, 4), torch.randn(2, 5, 8)
    before, kernels = convolution.before(x)
    assert torch.equal(before, x) and torch.equal(convolution.after(x, kernels), x)


# --- trees -----------------------------------------------------------------------------------------------------------


def marginals(depth: int, size: int, seed: int) -> torch.Tensor:
    noise = torch.randn(1, depth, size, generator=torch.Generator().manual_seed(seed)) * 1.5
    return noise.log_softmax(-1)


def nodes_of(tree) -> dict[tuple[int, ...], float]:
    """The paths of a tree, with their scores."""
    paths = {node: tuple(tree.tokens[each] for each in tree.path(node)) for node in range(1, len(tree))}
    return {path: tree.scores[node] for node, path in paths.items()}


@pytest.mark.parametrize("size", [1, 2, 7, 40, 400])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_first_tree_is_the_best_one_of_all(size, seed):
    """Of 5 tokens and 3 depths, against all 155 paths."""
    logs = marginals(3, 5, seed)
    expansion = FullExpansion(lambda level, tokens, states: (logs[:, level - 1 : level], None), 3)
    limits = TreeLimits(size, 8, 0.0, [3])
    [tree] = best_first_trees(expansion, torch.tensor([1]), torch.arange(5) + 10, limits)
    assert not tree.fault()
    every = {
        tuple(token + 10 for token in path): sum(float(logs[0, depth, token]) for depth, token in enumerate(path))
        for length in (1, 2, 3)
        for path in itertools.product(range(5), repeat=length)
    }
    best = sorted(every, key=lambda path: -every[path])[:size]
    found = nodes_of(tree)
    assert found.keys() == set(best)
    for path, score in found.items():
        assert score == pytest.approx(every[path], abs=1e-5)


def test_the_best_first_tree_is_a_beams_of_unlimited_width():
    logs = marginals(4, 9, 1).repeat(2, 1, 1)
    expansion = FullExpansion(lambda level, tokens, states: (logs[:, level - 1 : level], None), 4)
    wide = FullExpansion(
        lambda level, tokens, states: (logs[:, level - 1 : level].expand(-1, tokens.shape[1], -1), None), 4
    )
    roots, ids = torch.tensor([1, 2]), torch.arange(9)
    for depths, threshold in (([4, 4], 0.0), ([4, 2], 0.0), ([3, 4], 0.05)):
        found = best_first_trees(expansion, roots, ids, TreeLimits(20, 1, threshold, depths))
        wanted = beam_trees(wide, roots, ids, TreeLimits(20, 100, threshold, depths))
        for one, other in zip(found, wanted, strict=True):
            assert nodes_of(one) == pytest.approx(nodes_of(other))


def test_a_large_vocabulary_is_narrowed_to_likely_columns_for_each_text(tuned):
    tuned(likely_columns=12)
    head = MarkovHead(60, 60, 6, 5)
    randomise(head, std=0.3)
    slots = torch.randn(3, 2, 6)
    logits = torch.randn(3, 2, 60) * 2
    with torch.no_grad():
        expansion = ParallelExpansion(logits, BlockBias(head, None, slots))
        tokens, scores = torch.tensor([[4], [5], [6]]), torch.zeros(3, 1)
        values, columns, _, _ = expansion.best(1, tokens, None, scores, 5)
        for row in range(3):
            likely = logits[row].amax(dim=0).topk(12).indices
            biased = logits[row, 0] + head.markov_w2(head.markov_w1(tokens[row]))[0]
            wanted = biased[likely].log_softmax(-1).topk(5)
            assert likely[wanted.indices].tolist() == columns[row].tolist()
            assert torch.allclose(wanted.values, values[row], atol=1e-5)


# --- calls -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_chain_is_drafted_where_one_is_asked_for(target):
    drafter, text = make_block_drafter(target, "plain"), list(range(5, 15))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, text, 0, 9)])
    [tree] = session.draft([Ask(0, text[-1], depth=3, size=24, width=1)])
    assert tree.depths == (0, 1, 2, 3)
    [none] = session.draft([Ask(0, text[-1], depth=0, size=24)])
    assert len(none) == 1


def test_training_without_the_masks_embedding_is_an_error(target):
    drafter = make_block_drafter(target)
    told = news(drafter, target, list(range(5, 18)), 0, 12)
    with pytest.raises(ValueError, match="mask_embeds is missing: expected the embedding of token 3"):
        drafter(told.taps, torch.zeros(12, 32), told.positions)


# --- configuration and files -----------------------------------------------------------------------------------------


def test_a_fresh_drafter_follows_its_target(target):
    config = BlockConfig.for_target(target)
    assert config.sizes.hidden_size == target.config.hidden_size and config.sizes.qk_norm
    assert config.num_draft_steps == 8 and config.sample_from_anchor and config.markov_rank == 256
    assert config.mask_token_id == target.config.pad_token_id
    assert config.rope["rope_parameters"]["rope_theta"] == target.config.rope_parameters["rope_theta"]
    assert max(config.target_tap_layers) < target.config.num_hidden_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_draft_steps": 0}, "block_size=0 is invalid: expected an integer from 1"),
        ({"num_hidden_layers": 65}, "num_hidden_layers=65 is invalid"),
        ({"markov_rank": -1}, "markov_rank=-1 is invalid"),
        ({"target_tap_layers": (2, 1)}, r"target_tap_layers=\[2, 1\] is invalid: expected ascending"),
        ({"target_tap_layers": (4,)}, r"target_tap_layers=\[4\] is invalid"),
        ({"markov_head_type": "x"}, "markov_head_type='x' is invalid: expected one of vanilla, gated, rnn"),
        ({"hidden_size": 16}, "hidden_size=16 is invalid: expected target_hidden_size=32"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "conv_group_size=5 is invalid: expected a divisor"),
        (
            {"selector_rank": 4},
            r"domino_rank and xpress_rank=\(256, 4, 0, 0\) is invalid: expected at most one",
        ),
        ({"no_such_field": 1}, "has no no_such_field"),
        ({"sights": (Sight(),)}, "sights=.*one for each of the 3 layers"),
    ],
)
def test_wrong_fields_are_named(fields, message, target):
    with pytest.raises(ValueError, match=message):
        BlockDrafter.for_target(target, **fields)


def test_a_part_of_the_vocabulary_needs_ids(target):
    with pytest.raises(ValueError, match="without draft_vocab_ids"):
        BlockDrafter.for_target(target, draft_vocab_size=10)
    with pytest.raises(ValueError, match="ascending"):
        BlockDrafter.for_target(target, draft_vocab_ids=[3, 2])
    with pytest.raises(ValueError, match=f"holds {VOCAB}: expected ids below"):
        BlockDrafter.for_target(target, draft_vocab_ids=[3, VOCAB])


# --- confidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["markov", "hidden"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_a_confidence_head_lowers_scores_by_its_formula(target, kind, reads):
    """DSpark: sigmoid(w [h ; w(x)] + b) of the slot and the token before it, times the drafter's probability."""
    drafter = make_block_drafter(target, kind, confidence_head=reads, sample_from_anchor=True)
    session, text = session_of(drafter, target), [5, 6, 7, 8, 9, 10, 11, 12]
    session.observe([news(drafter, target, text, 0, 7)])
    asks, options = [Ask(0, text[-1], 3, 24, 5)], session.options_for(Ask(0, text[-1], 3, 24, 5))
    hidden = session.drafted(asks, 3)
    expansion, tokens, states = session.expansion(asks, 3, options), torch.tensor([[text[-1]]]), None
    scores = torch.zeros(1, 1)
    for level in range(1, 4):
        plain, _ = expansion(level, tokens, states)
        found, columns, parents, states = expansion.best(level, tokens, states, scores, 4)
        for place in range(4):
            parent = int(parents[0, place])
            rows = [drafter.markov_head.markov_w1.weight[tokens[0, parent]]] if reads == "markov" else []
            head = drafter.confidence_head.proj(torch.cat([hidden[0, level - 1], *rows])).sigmoid().log()
            row = plain[0, min(parent, plain.shape[1] - 1)]
            torch.testing.assert_close(found[0, place], scores[0, parent] + row[columns[0, place]] + head[0])
        tokens, scores = session.weights.vocab_ids[columns], found
        states = states.gather(1, parents[..., None].expand(-1, -1, states.shape[-1]))


@pytest.mark.parametrize("use", [True, False])
def test_a_head_without_confidence_ends_drafts_early(target, use):
    drafter = make_block_drafter(target, confidence_head="hidden", sample_from_anchor=True)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(-5.0)  # 0.0067 at each depth
    config = drafter.generation_config
    config.tree_sizing, config.assistant_confidence_threshold, config.use_confidence_head = "fixed", 1e-6, use
    out = as_plain(target, drafter, torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=24)
    depths = {len(tree.path(node)) for tree in session_trees(drafter, target) for node in range(1, len(tree))}
    assert out.statistics.rounds > 0 and (max(depths, default=0) > 2) != use


def session_trees(drafter, target):
    session, text = session_of(drafter, target), [5, 6, 7, 8, 9, 10, 11, 12]
    with torch.no_grad():
        session.observe([news(drafter, target, text, 0, 7)])
        return session.draft([Ask(0, text[-1], 4, 4, 1)])
