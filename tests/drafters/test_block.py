"""Block drafters: heads, trees of parallel drafts, exact texts, and the forward of training."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_target
from oracles.exactness import FullExpansion, chi_square
from oracles.format_parity import randomise
from session_helpers import news, padded

from hf_hsdraft import AutoDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Ask
from hf_hsdraft.drafters.base.tree_session import ParallelExpansion
from hf_hsdraft.drafters.block import block_context
from hf_hsdraft.drafters.block.block_session import BlockBias, BlockSession
from hf_hsdraft.drafters.block.configuration import BlockConfig, Sight
from hf_hsdraft.drafters.block.convolution import BlockConvolution
from hf_hsdraft.drafters.block.drafter import BlockDrafter
from hf_hsdraft.drafters.block.heads import CandidateSelector, GatedMarkovHead, MarkovHead, RecurrentMarkovHead
from hf_hsdraft.trees.best_first import best_first_trees
from hf_hsdraft.trees.tree_builders import TreeLimits, beam_trees

STEPS = 4
KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "plain": {"markov_rank": 0},
    "fill-in": {"markov_rank": 0, "sample_from_anchor": False},
    "sliding": {"sights": (Sight(5, True, True), Sight(4))},
    "selector": {"markov_rank": 0, "selector_rank": 8, "selector_top_k": 6, "conv_kernel_size": 2},
    "part": {"draft_vocab_ids": tuple(range(1, VOCAB, 3))},
    "own mask": {"learned_mask": True, "markov_rank": 0},
}


def make_block_drafter(target, kind: str = "vanilla", **overrides) -> BlockDrafter:
    """A drafter of random weights, whose drafts cost nothing."""
    fields = {"num_draft_steps": STEPS, "num_hidden_layers": 2, "markov_rank": 8, "mask_token_id": 3, **KINDS[kind]}
    fields |= {"intermediate_size": 48, **overrides}
    drafter = BlockDrafter.for_target(target, **fields).eval()
    randomise(drafter)
    if drafter.config.has_own_head:
        drafter.take_head(target.get_output_embeddings(), fields["draft_vocab_ids"])
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    return drafter


# --- heads -----------------------------------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def product(matrix: torch.Tensor, vector: list[float]) -> list[float]:
    return [math.fsum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix.tolist()]


def scalar_biases(head, tokens: list[int], slots: list[list[float]]) -> list[list[float]]:
    """The bias of each slot after the token before it, number by number."""
    biases = []
    state = None
    for token, slot in zip(tokens, slots, strict=True):
        if isinstance(head, CandidateSelector):
            told = product(head.hidden_projection.weight, slot)
            row = head.predecessor_codebook[token].tolist()
            code = [one * other for one, other in zip(row, told, strict=True)]
            biases.append(product(head.successor_codebook, code))
            continue
        row = head.markov_w1.weight[token].tolist()
        if isinstance(head, GatedMarkovHead):
            gates = product(head.gate_proj.weight, [*slot, *row])
            gates = [sigmoid(gate + bias) for gate, bias in zip(gates, head.gate_proj.bias.tolist(), strict=True)]
            code = [gate * value for gate, value in zip(gates, row, strict=True)]
        elif isinstance(head, RecurrentMarkovHead):
            state = state or [0.0] * len(row)
            joined = product(head.joint_proj.weight, [*state, *row, *slot])
            joined = [value + bias for value, bias in zip(joined, head.joint_proj.bias.tolist(), strict=True)]
            gates, candidates, outs = (joined[part * len(row) : (part + 1) * len(row)] for part in range(3))
            code = [math.tanh(out) for out in outs]
            mixed = zip(gates, state, candidates, strict=True)
            state = [sigmoid(gate) * old + (1 - sigmoid(gate)) * math.tanh(new) for gate, old, new in mixed]
        else:
            code = row
        biases.append(product(head.markov_w2.weight, code))
    return biases


HEADS = {
    "vanilla": lambda: MarkovHead(11, 7, 6, 5),
    "gated": lambda: GatedMarkovHead(11, 7, 6, 5),
    "rnn": lambda: RecurrentMarkovHead(11, 7, 6, 5),
    "selector": lambda: CandidateSelector(11, 6, 5, 4),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_their_formulas(kind):
    head, tokens = HEADS[kind](), [3, 10, 0, 3]
    randomise(head, std=0.7)
    slots = torch.randn(len(tokens), 6, generator=torch.Generator().manual_seed(1))
    wanted = torch.tensor(scalar_biases(head, tokens, slots.tolist()))
    states, before = None, None
    with torch.no_grad():
        for index, token in enumerate(tokens):
            states = head.advance(torch.tensor([token]), before, states)
            before = slots[index : index + 1]
            assert torch.allclose(head(before, states)[0], wanted[index], atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_a_tree_gives_each_node_the_bias_of_its_path(kind):
    """Level by level, with states that a builder gathers; and among some columns of each text as among all."""
    head = HEADS[kind]()
    randomise(head, std=0.7)
    generator = torch.Generator().manual_seed(2)
    slots = torch.randn(2, 3, 6, generator=generator)
    columns = torch.tensor([[0, 4, 2], [6, 1, 3]])
    with torch.no_grad():
        bias = BlockBias(head, slots, head.project(slots), 0)
        paths = torch.randint(11, (2, 4, 3), generator=generator)
        paths[:, :, 0] = paths[:, :1, 0]
        states = None
        for level in (1, 2, 3):
            tokens = paths[:, :1, 0] if level == 1 else paths[:, :, level - 1]
            states = bias.advance(level, tokens, states)
            code = bias.code(level, states)
            found, some = bias.up(code), bias.among(columns)(code)
            for row, node in itertools.product(range(2), range(tokens.shape[1])):
                path = paths[row, node, :level].tolist()
                wanted = scalar_biases(head, path, slots[row, :level].tolist())[-1]
                assert torch.allclose(found[row, node], torch.tensor(wanted), atol=1e-5)
                assert torch.allclose(some[row, node], found[row, node, columns[row]], atol=1e-6)
            if level == 1:
                states = states.expand(-1, 4, -1)


def test_a_selector_chooses_among_the_best_only():
    logits = torch.tensor([[1.0, 5.0, 2.0, 4.0, 3.0]])
    kept = CandidateSelector(5, 6, 2, 3).keep_candidates(logits)
    assert kept.tolist() == [[-math.inf, 5.0, -math.inf, 4.0, 3.0]]


def test_convolutions_are_their_formula():
    convolution = BlockConvolution(8, 3, 4)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        before, kernels = convolution.before(x)
        assert torch.equal(before, x) and torch.equal(convolution.after(x, kernels), x)  # the identity at first
        randomise(convolution)
        before, kernels = convolution.before(x)
        after = convolution.after(x, kernels)
        deltas = convolution.kernel_projection(x).view(2, 5, 2, 3, 2)
        for side, found in ((0, before), (1, after)):
            for block, slot, channel in itertools.product(range(2), range(5), range(8)):
                wanted = sum(
                    (convolution.base_kernel[side, back, channel] + deltas[block, slot, side, back, channel // 4])
                    * x[block, slot - back, channel]
                    for back in range(3)
                    if slot >= back
                )
                assert float(found[block, slot, channel]) == pytest.approx(float(wanted), abs=1e-5)


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
        expansion = ParallelExpansion(logits, BlockBias(head, slots, head.project(slots), 0))
        tokens, scores = torch.tensor([[4], [5], [6]]), torch.zeros(3, 1)
        values, columns, _, _ = expansion.best(1, tokens, None, scores, 5)
        for row in range(3):
            likely = logits[row].amax(dim=0).topk(12).indices
            biased = logits[row, 0] + head.markov_w2(head.markov_w1(tokens[row]))[0]
            wanted = biased[likely].log_softmax(-1).topk(5)
            assert likely[wanted.indices].tolist() == columns[row].tolist()
            assert torch.allclose(wanted.values, values[row], atol=1e-5)


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_texts_are_those_of_plain_decoding(kind, rows, target):
    inputs, call = padded(rows), {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**inputs, **call)
    drafter = make_block_drafter(target, kind)
    output = target.generate(**inputs, **call, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert sum(output.statistics.drafted_nodes) > 0


@pytest.mark.parametrize("kind", ["vanilla", "plain", "selector"])
@pytest.mark.parametrize("options", [{}, {"beam_width": 1}], ids=["trees", "chains"])
def test_sampled_texts_have_the_same_seed(kind, options, target):
    """By the walk; with top-k the draws are foreseen."""
    inputs, call = padded(1), {"max_new_tokens": 20, "do_sample": True, "top_k": 20}
    torch.manual_seed(4)
    plain = target.generate(**inputs, **call)
    drafter = make_block_drafter(target, kind)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    torch.manual_seed(4)
    assert target.generate(**inputs, **call, assistant_model=drafter).tolist() == plain.tolist()


def test_rows_of_a_sampled_batch_have_seeds_of_their_own(target):
    inputs, call = padded(3), {"max_new_tokens": 16, "do_sample": True}
    expected = each_with_its_seed(target, inputs["input_ids"], inputs["attention_mask"], 9, **call)
    drafter = make_block_drafter(target)
    torch.manual_seed(9)
    found = target.generate(**inputs, **call, assistant_model=drafter)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["vanilla", "selector", "plain"])
@pytest.mark.parametrize("builder", ["gumbel", "stochastic_beam"])
def test_texts_by_rejection_are_distributed_as_the_targets(kind, builder):
    """Of 6 tokens, texts of three: their counts against the target's own probabilities."""
    size, rows, calls = 6, 200, 8
    target = make_target(vocab_size=size, pad_token_id=0, bos_token_id=1)
    overrides = {"selector_top_k": 4} if kind == "selector" else {}
    drafter = make_block_drafter(target, kind, **overrides)
    options = {"tree_builder": builder, "verification": "rejection", "tree_size": 12, "beam_width": 3}
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    prompt = torch.tensor([[1, 4, 2]])
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(calls):
        output = target.generate(
            prompt.expand(rows, -1), max_new_tokens=3, do_sample=True, top_k=0, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        counts.update(tuple(text) for text in output.sequences[:, 3:].tolist())
        accepted += sum(output.statistics.accepted_lengths)
    with torch.no_grad():
        texts = torch.tensor(list(itertools.product(range(size), repeat=3)))
        ids = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
        logs = target(ids).logits[:, 2:5].double().log_softmax(-1)
        exact = logs.gather(-1, texts[..., None]).sum(dim=(1, 2)).exp().view(size, size, size)
    assert accepted > 0
    assert chi_square(counts, exact) > 1e-4


def test_prompts_given_as_embeddings(target):
    embeds = target.get_input_embeddings()(padded(1)["input_ids"]).detach()
    call = {"inputs_embeds": embeds, "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**call)
    assert target.generate(**call, assistant_model=make_block_drafter(target)).tolist() == plain.tolist()


def test_a_chat_that_continues_a_cache_keeps_its_context(target, monkeypatch):
    """The second call drafts as one call would that reads the whole text."""
    drafter = make_block_drafter(target)
    drafter.generation_config.ngram_length, drafter.generation_config.tree_sizing = 0, "fixed"
    noted: list[list] = []
    slots = BlockSession.slots

    def noting(self, rows, roots):
        found = slots(self, rows, roots)
        noted[-1].append((int(self.anchors([0])), found))
        return found

    monkeypatch.setattr(BlockSession, "slots", noting)
    ids = padded(1)["input_ids"]

    def decoded(inputs, **call):
        noted.append([])
        return target.generate(inputs, do_sample=False, assistant_model=drafter, return_dict_in_generate=True, **call)

    first = decoded(ids, max_new_tokens=7)
    more = torch.cat([first.sequences, torch.tensor([[8, 9, 10]])], dim=1)
    continued = decoded(more, max_new_tokens=7, past_key_values=first.past_key_values)
    whole = decoded(more, max_new_tokens=7)
    assert continued.sequences.tolist() == whole.sequences.tolist()
    assert len(noted[1]) == len(noted[2]) > 0
    for (one, hidden), (other, wanted) in zip(noted[1], noted[2], strict=True):
        assert one == other and torch.allclose(hidden, wanted, atol=1e-4)


def session_of(drafter, target, rows: int = 1) -> BlockSession:
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return BlockSession(drafter, weights, DraftOptions.of(drafter), batch_size=rows)


@torch.no_grad()
def test_texts_of_a_batch_are_drafted_as_each_alone(target):
    drafter = make_block_drafter(target, "sliding")
    texts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34]]
    together = session_of(drafter, target, rows=3)
    together.observe([news(drafter, target, text, 0, len(text) - 1, row) for row, text in enumerate(texts)])
    found = together.slots([2, 0, 1], [texts[row][-1] for row in (2, 0, 1)])
    for place, row in enumerate((2, 0, 1)):
        alone = session_of(drafter, target)
        alone.observe([news(drafter, target, texts[row], 0, len(texts[row]) - 1)])
        assert torch.allclose(alone.slots([0], [texts[row][-1]])[0], found[place], atol=1e-4)


@torch.no_grad()
def test_what_is_read_piece_by_piece_is_read_alike(target, tuned):
    """Also where nothing was drafted for so long that it is read without a draft."""
    tuned(most_pending=2)
    drafter, text = make_block_drafter(target), list(range(5, 18))
    whole, pieces = session_of(drafter, target), session_of(drafter, target)
    whole.observe([news(drafter, target, text, 0, 12)])
    for start, end in ((0, 3), (3, 4), (4, 6), (6, 7), (7, 12)):
        pieces.observe([news(drafter, target, text, start, end)])
    wanted, found = whole.slots([0], [text[-1]]), pieces.slots([0], [text[-1]])
    assert torch.allclose(wanted, found, atol=1e-5)


@torch.no_grad()
def test_a_chain_is_drafted_where_one_is_asked_for(target):
    drafter, text = make_block_drafter(target, "plain"), list(range(5, 15))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, text, 0, 9)])
    [tree] = session.draft([Ask(0, text[-1], depth=3, size=24, width=1)])
    assert tree.depths == (0, 1, 2, 3)
    [none] = session.draft([Ask(0, text[-1], depth=0, size=24)])
    assert len(none) == 1


# --- training --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "fill-in", "sliding", "selector", "own mask"])
def test_training_computes_what_decoding_drafts(kind, target, monkeypatch):
    """Many blocks over two packed texts in one forward, against a session for each block."""
    monkeypatch.setattr(block_context, "_BLOCKS_AT_ONCE", 3)
    drafter = make_block_drafter(target, kind)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    texts = [list(range(5, 18)), list(range(40, 49))]
    told = [news(drafter, target, text, 0, len(text) - 1) for text in texts]
    lengths = [len(text) - 1 for text in texts]
    starts = [0, 4, 11, 12, 15, 19, 7]  # the last position of the second text is 19
    output = drafter(
        torch.cat([each.taps for each in told]),
        weights.embed(torch.cat([each.following for each in told])),
        torch.cat([each.positions for each in told]),
        starts=torch.tensor(starts),
        document_ids=torch.tensor([0] * lengths[0] + [1] * lengths[1]),
        num_rolled=5,
        mask_embeds=weights.embed(torch.tensor(drafter.config.mask_token_id)),
    )
    drafts = output.hidden_states
    assert [len(states) for states in drafts] == [7] + [5] * (drafter.num_draft_steps - 1)
    for block, start in enumerate(starts):
        text, place = (texts[0], start) if start < lengths[0] else (texts[1], start - lengths[0])
        session = session_of(drafter, target)
        session.observe([news(drafter, target, text, 0, place + 1)])
        [wanted] = session.slots([0], [text[place + 1]])
        for depth in range(drafter.num_draft_steps if block < 5 else 1):
            assert torch.allclose(drafts[depth][block], wanted[drafter.config.first_slot + depth], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "selector"])
def test_the_teacher_forced_bias_is_that_of_a_tree(kind, target):
    drafter, text = make_block_drafter(target, kind), list(range(5, 18))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, text, 0, 8)])
    hidden = session.slots([0], [text[8]])
    expansion = session.expansion_of([Ask(0, text[8], depth=STEPS, size=9)], hidden, 3, DraftOptions.of(drafter))
    states, nodes, before = None, None, None
    weights = session.weights
    for depth in range(3):
        token = torch.tensor([text[8 + depth]])
        states = drafter.advance(token, before, states)
        before = hidden[:, drafter.config.first_slot + depth]
        logits = drafter.logits(before, weights) + drafter.token_bias(depth, before, states)
        wanted, nodes = expansion(depth + 1, token[None], nodes)
        kept = ~wanted[0, 0].isinf()
        assert torch.allclose(logits[0, kept].log_softmax(-1), wanted[0, 0, kept], atol=1e-4)


def test_gradients_reach_every_part(target):
    drafter = make_block_drafter(target, "gated").train()
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    told = news(drafter, target, list(range(5, 18)), 0, 12)
    output = drafter(
        told.taps.detach(), weights.embed(told.following), told.positions, torch.tensor([3, 6]),
        mask_embeds=weights.embed(torch.tensor(3)), labels=None,
    )  # fmt: skip
    states, loss = drafter.advance(torch.tensor([7, 8])), torch.zeros(())
    for depth, hidden in enumerate(output.hidden_states):
        loss = loss + (drafter.logits(hidden, weights) + drafter.token_bias(depth, hidden, states)).logsumexp(-1).sum()
    loss.backward()
    without = [name for name, parameter in drafter.named_parameters() if parameter.grad is None]
    assert not without


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
        ({"selector_rank": 4}, "markov_rank=256 is invalid: expected 0 beside a selector"),
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


def test_a_recurrent_head_of_the_fill_in_layout_is_not_trained(target):
    drafter = make_block_drafter(target, "rnn", sample_from_anchor=False)
    with pytest.raises(ValueError, match="can draft, but not be trained"):
        drafter.advance(torch.tensor([1]))


def test_saving_over_another_drafter_leaves_nothing_of_it(target, tmp_path):
    make_block_drafter(target, "own mask", target_name="user/target").save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "family `dspark`" in card and "user/target" in card and "reads hidden states" in card
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"of a former drafter")
    assert (tmp_path / "mask_embedding.pt").is_file()
    assert AutoDrafter.from_pretrained(tmp_path).config.learned_mask
    drafter = make_block_drafter(target)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert not list(tmp_path.glob("model-*"))
    assert not again.config.learned_mask and again.generation_config.num_assistant_tokens == 2
    drafter.generation_config.num_assistant_tokens = STEPS + 1
    with pytest.raises(ValueError, match="num_assistant_tokens=5"):
        drafter.save_pretrained(tmp_path)


def test_a_drafter_is_taken_by_name(target, tmp_path):
    make_block_drafter(target).save_pretrained(tmp_path)
    inputs, call = padded(1), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **call)
    assert target.generate(**inputs, **call, assistant_model=str(tmp_path)).tolist() == plain.tolist()
