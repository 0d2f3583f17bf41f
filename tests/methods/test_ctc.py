"""Frames with a blank: their trees and their loss against enumeration, their training, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from conftest import make_target
from test_trainable import FRAMES, IDS, assert_gradients, borrow, decodes_as_plain, packed, plan, random_drafter, run

from hf_hsdraft import AutoDrafter, SpecFormerDrafter
from hf_hsdraft.core.draft_tree import TreeLimits, beam_trees
from hf_hsdraft.methods.co_training.co_training import CoTraining
from hf_hsdraft.methods.specformer.collapsed_frames import CollapsedFrames
from hf_hsdraft.methods.specformer.training import CTCLoss, ctc_losses
from hf_hsdraft.training.evaluate.parity import parity
from hf_hsdraft.training.families.trainable import family_of
from hf_hsdraft.training.loss.chains import Chains, true_labels, unroll

STEPS, LABELS = 5, 3
TOKENS = torch.tensor([4, 7, 9])  # the blank is column 3


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
    ids = TOKENS.tolist()
    paths = {node: tuple(ids.index(tree.tokens[each]) for each in tree.path(node)) for node in range(1, len(tree))}
    return {path: tree.scores[node] for node, path in paths.items()}


@pytest.mark.parametrize(("count", "depth"), [(1, 1), (2, 2), (5, 5), (4, 2)])
def test_every_node_has_the_probability_of_all_its_sequences(count, depth):
    """Of two texts at once. Also paths that cannot be said: a token twice in two frames leaves no room for a blank."""
    frames = random_frames(2, count, seed=count)
    expansion = CollapsedFrames(frames, TOKENS, depth)
    limits = TreeLimits(10_000, 10_000, 0.0, [depth, depth])
    trees = beam_trees(expansion, torch.tensor([7, 1]), TOKENS, limits)
    for row, tree in enumerate(trees):
        wanted = {path: value for path, value in enumerated(frames[row]).items() if 0 < len(path) <= depth}
        found = nodes_of(tree)
        assert not tree.fault(10) and found.keys() == wanted.keys()
        for path, score in found.items():
            assert math.exp(score) == pytest.approx(wanted[path], rel=1e-4), path
    assert count == 1 or (0,) * count not in found


def test_drawn_nodes_have_distributions_that_add_up():
    frames = random_frames(1, 4, seed=7)
    every = enumerated(frames[0])
    expansion = CollapsedFrames(frames, TOKENS, 4, normalised=True, temperature=0.7)
    state = None
    for level, path in enumerate([(), (2,), (2, 0)], 1):
        token = torch.tensor([[1 if not path else int(TOKENS[path[-1]])]])
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
    expansion = CollapsedFrames(random_frames(1, 4, seed=9), TOKENS, 4)
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
    expansion = CollapsedFrames(frames, TOKENS, 5)
    [tree] = beam_trees(expansion, torch.tensor([1]), TOKENS, TreeLimits(20, 100, 0.0, [5]))
    every = enumerated(frames[0])
    for path, score in nodes_of(tree).items():
        assert math.exp(score) == pytest.approx(every[path], rel=1e-4)


# --- training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=4)


def framed(target, **fields) -> SpecFormerDrafter:
    return random_drafter(target, "specformer", FRAMES | fields)


def loss_of(drafter, target, pack, chains: Chains, labels=None, **fields):
    weights = borrow(drafter, target)
    rows = target.get_output_embeddings().weight.detach()[weights.vocab_ids]
    drafter.loss_function = CTCLoss(weights, rows, LABELS, **fields)
    labels = true_labels(pack, chains, STEPS) if labels is None else labels
    predictions = family_of(drafter).predictions(drafter, weights)
    return unroll(drafter, predictions, pack, chains, labels.tokens, labels).loss


@pytest.mark.parametrize("labels", [(), (1,), (2, 0), (1, 1), (0, 2, 1), (1, 1, 0), (1, 1, 1)])
def test_the_loss_is_that_of_all_sequences_of_frames(labels):
    """Three equal tokens need two blanks between them, for which four frames have no room: they do not count."""
    frames = random_frames(1, 4, seed=len(labels) + 1)
    probability = sum(
        math.exp(sum(float(frames[0, frame, symbol]) for frame, symbol in enumerate(symbols)))
        for symbols in itertools.product(range(4), repeat=4)
        if collapsed(symbols, 3) == labels
    )
    choices, lengths = torch.zeros(1, 3, dtype=torch.long), torch.tensor([len(labels)])
    choices[0, : len(labels)] = torch.tensor(labels, dtype=torch.long)
    found = float(ctc_losses(frames, choices, lengths))
    assert found == pytest.approx(-math.log(probability) if labels and probability else 0.0, rel=1e-4)


@torch.no_grad()
def test_the_loss_of_a_step_is_its_formula(target):
    """Chain by chain in double precision, with the target's first choices as labels, up to the first that is none."""
    drafter = framed(target)
    pack = packed(target, drafter, 20)
    starts = [6, 9, 12, 16, 17]
    chains = Chains(torch.tensor(starts), len(starts), torch.tensor([True] * 4 + [False]))
    labels = true_labels(pack, chains, STEPS)
    labels.valid[1, 1] = False
    parts = loss_of(drafter, target, pack, chains, labels, chunk_logits=2 * STEPS * len(IDS))
    weights = borrow(drafter, target)
    hidden = torch.stack(
        drafter(pack.taps, weights.embed(pack.input_ids.roll(-1)), pack.position_ids, torch.tensor(starts),
                pack.document_ids).hidden_states, dim=1,
    )  # fmt: skip
    logits = torch.cat([drafter.logits(hidden, weights), (drafter.norm(hidden) @ drafter.blank)[..., None]], dim=-1)
    rows = target.get_output_embeddings().weight[torch.tensor(IDS)]
    total, distances = 0.0, [[] for _ in range(LABELS)]
    for chain, start in enumerate(starts[:4]):
        places = itertools.takewhile(lambda depth: labels.valid[chain, depth], range(LABELS))  # noqa: B023
        choices = [int((rows @ pack.final[start + 1 + depth]).argmax()) for depth in places]
        logs = logits[chain].double().log_softmax(-1)
        total += float(torch.nn.functional.ctc_loss(
            logs, torch.tensor(choices), torch.tensor(STEPS), torch.tensor(len(choices)), len(IDS), "sum"
        ))  # fmt: skip
        for depth in range(len(choices)):
            begun = [_beginning(logs, choices[:length]) for length in (depth, depth + 1)]
            distances[depth].append(begun[0] - begun[1])
    assert [len(each) for each in distances] == parts.count.tolist()[:LABELS] == [4, 3, 2]
    assert parts.count.tolist()[LABELS:] == [0, 0]
    assert float(parts.loss) == pytest.approx(total / float(labels.count[:LABELS].sum()), rel=1e-4)
    wanted = [sum(each) / len(each) for each in distances]
    assert parts.divergence.tolist()[:LABELS] == pytest.approx(wanted, rel=1e-3)


def _beginning(logs: torch.Tensor, choices: list[int]) -> float:
    """The log-probability that frames `[K, V' + 1]` say a text that begins with some columns, by enumeration.

    All other tokens are one symbol: once one of them is said, the text is another.
    """
    symbols = sorted(set(choices))
    others = sorted(set(range(logs.shape[-1] - 1)) - set(symbols))
    frames = torch.cat([logs[:, symbols], logs[:, others].logsumexp(dim=-1, keepdim=True), logs[:, -1:]], dim=-1)
    return math.log(enumerated(frames)[tuple(map(symbols.index, choices))])


def test_gradients_are_those_of_the_loss(target):
    """Computed chunk by chunk in the forward, they agree with finite differences; and nothing trained is left out."""
    drafter = framed(target, head="trained", hidden_size=24)
    pack = packed(target, drafter, 20)
    chains = Chains(torch.tensor([6, 9, 12]), 3, torch.ones(3, dtype=torch.bool))
    loss_of(drafter, target, pack, chains, chunk_logits=STEPS * len(IDS)).loss.backward()
    assert all(each.grad is not None for each in drafter.parameters())
    assert_gradients(dict(drafter.named_parameters()), lambda: loss_of(drafter, target, pack, chains).loss)


def test_parity_leaves_out_what_frames_have_no_room_for():
    """A text of one token over and over: after K / 2 of them, no frames are left that could say more."""
    constant = make_target()
    with torch.no_grad():
        for parameter in constant.parameters():
            parameter.zero_()
    report = parity(framed(constant), constant, [torch.tensor([[5, 6, 7]])], max_new_tokens=16)
    counts = [depth.predictions for depth in report.depths]
    assert report.passed and min(counts[:3]) >= 8 and len(counts) == 3


@torch.no_grad()
def test_what_is_predicted_after_a_path_is_what_a_tree_says(target):
    drafter = framed(target)
    weights, pack = borrow(drafter, target), packed(target, drafter, 20)
    predictions = family_of(drafter).predictions(drafter, weights)
    chains = Chains(torch.tensor([6, 9]), 2, torch.ones(2, dtype=torch.bool))
    tokens = torch.tensor([[50, 21, 21, 33, 90], [3, 44, 20, 59, 20]])  # 90 cannot be drafted
    hidden = unroll(drafter, predictions, pack, chains, tokens).hidden_states
    states, nodes = predictions.states(tokens, hidden), None
    tree = CollapsedFrames(drafter.frames(torch.stack(list(hidden), dim=1), weights), weights.vocab_ids, STEPS)
    for depth in range(STEPS):
        wanted, nodes = tree(depth + 1, tokens[:, depth : depth + 1], nodes)
        torch.testing.assert_close(predictions.logits(hidden[depth], states[depth]), wanted[:, 0])


SIZES = {"num_draft_steps": 4, "draft_vocab_size": 40, "tree_size": 6}
STEPWISE = {"max_steps": 30, "eval_steps": 30, "learning_rate": 2e-2}


@pytest.mark.train
@pytest.mark.parametrize("arguments", [{}, {"bf16": True, "activation_checkpointing": True, "ctc_labels": 3}])
def test_a_few_steps_lower_the_loss(chatty, tokenizer, tmp_path, arguments):
    planned = plan(tmp_path, "specformer", drafter=SIZES)
    run(chatty, tokenizer, planned, objective="ctc", **STEPWISE, **arguments)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())["training"]["history"]
    losses = [entry["loss"] for entry in figures if "loss" in entry]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5]), losses
    assert max(entry["eval_parity"] for entry in figures if "eval_parity" in entry) < 1e-3
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    assert loaded.config.ctc and json.loads((tmp_path / "out" / "config.json").read_text())["ctc"] is True
    assert decodes_as_plain(chatty, loaded)


@pytest.mark.train
def test_a_run_goes_on_with_its_own_objective_only(chatty, tokenizer, tmp_path):
    planned, steps = plan(tmp_path, "specformer", drafter=SIZES), {"max_steps": 2, "eval_steps": 2}
    run(chatty, tokenizer, planned, objective="ctc", **steps)
    with pytest.raises(ValueError, match="ctc_labels: 'None' -> '1'"):
        run(chatty, tokenizer, planned, objective="ctc", ctc_labels=1, **steps)
    further = replace(planned, init_from=str(tmp_path / "out"), out=str(tmp_path / "further"), drafter={})
    assert run(chatty, tokenizer, further, objective="ctc", **steps).config.ctc
    with pytest.raises(ValueError, match="objective='forward_kl' is invalid for this drafter, which learns by 'ctc' o"):
        run(chatty, tokenizer, replace(further, out=str(tmp_path / "x")))


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("block", {}, "ctc=True is invalid with family='block'.*train one of family specformer"),
        ("specformer", {"data_policy": "mixed"}, "data_policy='mixed' is invalid with objective='ctc'"),
        ("specformer", {"depth_weighting": "d-pace"}, "depth_weighting='d-pace' is invalid with objective='ctc'"),
        ("specformer", {"ce_share": 0.5}, "ce_share=0.5 is invalid with objective='ctc'"),
        ("specformer", {"rolled_fraction": 0.5}, "rolled_fraction=0.5 is invalid with objective='ctc'"),
        ("specformer", {"cosine_weight": 1.0}, "cosine_weight=1.0 is invalid with objective='ctc'"),
        ("specformer", {"ctc_labels": 5}, "ctc_labels=5 is invalid: expected at most num_draft_steps=4"),
        ("specformer", {"ctc_labels": 0}, "ctc_labels=0 is invalid: expected 1 or more"),
        ("specformer", {"ctc_labels": 2, "objective": "forward_kl"}, "ctc_labels=2 is invalid.*objective='ctc'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(chatty, tokenizer, tmp_path, family, arguments, message):
    planned = plan(tmp_path, family, drafter={} if family == "block" else SIZES)
    with pytest.raises(ValueError, match=message):
        run(chatty, tokenizer, planned, **{"objective": "ctc", **arguments})
    assert not (tmp_path / "out").exists()


def test_frames_are_not_trained_beside_their_target(target, tokenizer):
    with pytest.raises(ValueError, match="is trained by `hsdraft train --objective ctc` only"):
        CoTraining(target, framed(target), tokenizer)
