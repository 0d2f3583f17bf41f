"""Training sees what decoding sees, and the loss is what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from session_helpers import drafted_by, hidden_session

from hf_hsdraft.methods.on_policy.own_tokens import drafted_labels
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import Features, cache_features
from hf_hsdraft.training.evaluate import parity as parity_module
from hf_hsdraft.training.evaluate.parity import parity
from hf_hsdraft.training.loss.loss import (
    ChainLoss,
    Chains,
    LossParts,
    Pack,
    chain_starts,
    sample_chains,
    true_labels,
)
from hf_hsdraft.training.loss.objectives import OBJECTIVES, total_variation


def conversation(length: int, seed: int) -> TokenizedConversation:
    ids = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(length) >= length // 3
    return TokenizedConversation(ids, mask)


@pytest.fixture
def features(target, tmp_path) -> list[Features]:
    taps = make_drafter(target).config.target_tap_layers
    dataset = cache_features(target, taps, [conversation(20, 1), conversation(26, 2)], tmp_path)
    return [dataset[index] for index in range(len(dataset))]


def borrow(drafter, target):
    return drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())


def packed(features, multiple: int = 1) -> Pack:
    return Pack.of(features, pad_to_multiple_of=multiple).to(torch.device("cpu"), torch.float32)


def chains_at(*starts: int, num_rolled: int | None = None) -> Chains:
    places = torch.tensor(starts)
    return Chains(places, len(starts) if num_rolled is None else num_rolled, torch.ones(len(starts), dtype=torch.bool))


def loss_of(drafter, target, pack: Pack, chains: Chains, labels=None, **fields) -> LossParts:
    weights = borrow(drafter, target)
    steps = drafter.config.num_draft_steps
    fields = {"objective": OBJECTIVES["forward_kl"], "depth_weights": [0.5**depth for depth in range(steps)], **fields}
    drafter.loss_function = ChainLoss(weights, weights.head, **fields)
    return drafter(
        pack.taps,
        weights.embed(pack.input_ids.roll(-1)),
        pack.position_ids,
        chains.starts,
        pack.document_ids,
        num_rolled=chains.num_rolled,
        labels=true_labels(pack, chains, steps) if labels is None else labels,
    ).loss


@pytest.mark.parametrize(("layers", "injector"), [(1, "path"), (2, "low_rank")])
def test_training_logits_are_those_of_decoding(target, features, layers, injector):
    """The field's most common bug: a shift between the two. Every depth, second document of a pack, true tokens."""
    drafter = make_drafter(target, num_hidden_layers=layers, injector=injector)
    weights = borrow(drafter, target)
    pack = packed(features)
    offset, start = len(features[0].input_ids), 12
    ids, taps = features[1].input_ids, features[1].taps.float()
    trained = drafter(
        pack.taps,
        weights.embed(pack.input_ids.roll(-1)),
        pack.position_ids,
        starts=torch.tensor([offset + start, 5]),
        document_ids=pack.document_ids,
    )
    generator = hidden_session(drafter, weights)
    # As in decoding: the prompt in one piece, then what two rounds accepted.
    for begin, end in ((0, 7), (7, 8), (8, start + 1)):
        generator.read(taps[begin:end], ids[begin + 1 : end + 1], torch.arange(begin, end))
        drafted_by(generator)
    for depth, states in enumerate(trained.hidden_states):
        torch.testing.assert_close(states[0], generator._rows[0].drafted[depth], atol=1e-3, rtol=1e-3)


def test_loss_is_the_divergence_of_the_true_next_tokens(target, features):
    """Brute force for one chain: a fresh teacher, and the student from its public parts, depth by depth."""
    drafter = make_drafter(target, draft_vocab_size=40)
    weights = borrow(drafter, target)
    pack = packed(features[:1])
    ids = features[0].input_ids
    start = 9
    parts = loss_of(drafter, target, pack, chains_at(start))
    expected = []
    with torch.no_grad():
        teacher = target(ids[None]).logits[0, :, weights.vocab_ids].log_softmax(-1)
        hidden = drafter(
            pack.taps[: start + 1], weights.embed(ids[1 : start + 2]), torch.arange(start + 1)
        ).hidden_states
        state = drafter.injector.advance(weights.embed(ids[start + 1 : start + 2]), None)
        for depth in range(drafter.config.num_draft_steps):
            logits = drafter.logits(hidden[depth], weights)
            if depth:
                parent = ids[start + 1 + depth : start + 2 + depth]
                state = drafter.injector.advance(weights.embed(parent), state)
                logits = logits + drafter.injector(hidden[depth], state)
            goal = teacher[start + 1 + depth]  # what the target says after x_{start + 1 + depth}
            expected.append((goal.exp() * (goal - logits[0].log_softmax(-1))).sum())
    expected = torch.stack(expected)
    # Features are kept in bfloat16.
    torch.testing.assert_close(parts.divergence, expected, atol=0.05, rtol=0.02)
    scale = 0.5 ** torch.arange(len(expected))
    torch.testing.assert_close(parts.loss, (parts.divergence * scale).sum() / scale.sum())


P, Q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward_kl", 0.5 * math.log(2) - 0.25 * math.log(2)),
        ("reverse_kl", 0.5 * math.log(2) - 0.25 * math.log(2)),
        ("jensen_shannon", 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        ("total_variation", 0.25),
        ("hard_labels", math.log(4)),
        ("kl_ce", 0.5 * math.log(4) + 0.5 * 0.25 * math.log(2)),
        ("ce_tv", 0.1 * math.log(4) + 0.9 * 0.25),
        ("nla", -math.log(0.75)),
        ("lk_hybrid", math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25),
    ],
)
def test_objectives_have_their_closed_forms(name, expected):
    """Target (1/2, 1/4, 1/4), drafter (1/4, 1/2, 1/4); logits may be shifted, since only probabilities count."""
    value = OBJECTIVES[name](Q.log() + 3.0, P.log() - 1.0)
    torch.testing.assert_close(value, torch.tensor([expected]))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objectives_pull_towards_the_target(name):
    """Zero at the target itself (with hard labels never), and their gradient leads there."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(4, 9, generator=generator)
    if name not in ("hard_labels", "ce_tv", "kl_ce"):
        torch.testing.assert_close(OBJECTIVES[name](teacher.clone(), teacher), torch.zeros(4), atol=1e-6, rtol=0)
    logits = torch.randn(4, 9, generator=generator).requires_grad_()
    before = total_variation(logits, teacher).mean().item()
    for _ in range(400):
        (gradient,) = torch.autograd.grad(OBJECTIVES[name](logits, teacher).sum(), logits)
        logits = (logits - 0.2 * gradient).detach().requires_grad_()
    right = logits.argmax(-1) == teacher.argmax(-1)
    assert right.all()
    if name not in ("hard_labels", "kl_ce"):  # cross-entropy pulls to one token
        assert total_variation(logits, teacher).mean() < 0.5 * before


@pytest.mark.parametrize(
    ("layers", "head", "injector"),
    [(1, "target", "path"), (2, "trained", "path"), (1, "trained", "low_rank"), (2, "target", "selector")],
)
def test_neither_padding_nor_chunks_change_loss_or_gradients(target, features, layers, head, injector):
    drafter = make_drafter(target, num_hidden_layers=layers, head=head, injector=injector, initializer_range=0.05)
    weights = borrow(drafter, target)
    chains = chains_at(8, 17, 30, 43, num_rolled=3)  # the last ones reach past the end of their documents
    filled = Chains(torch.tensor([8, 17, 30, 0, 43, 0]), 4, torch.tensor([True, True, True, False, True, False]))
    results = []
    for multiple, picked, chunk in ((1, chains, 10**9), (64, filled, 10**9), (1, chains, 2 * VOCAB)):
        pack = packed(features, multiple)
        drafter.zero_grad()
        teacher = weights.head if head == "target" else target.get_output_embeddings().weight.detach()
        loss = ChainLoss(weights, teacher, OBJECTIVES["forward_kl"], [1.0] * 4, chunk_logits=chunk, scored_logits=chunk)
        drafter.loss_function = loss
        labels = replace(true_labels(pack, picked, 4), regression=0.3)
        embeds = weights.embed(pack.input_ids.roll(-1))
        parts = drafter(
            pack.taps, embeds, pack.position_ids, picked.starts, pack.document_ids,
            num_rolled=picked.num_rolled, labels=labels,
        ).loss  # fmt: skip
        parts.loss.backward()
        gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
        results.append((parts, gradients))
    plain, gradients = results[0]
    for parts, others in results[1:]:
        torch.testing.assert_close(parts.divergence, plain.divergence)
        torch.testing.assert_close(parts.loss, plain.loss)
        assert parts.accuracy.tolist() == plain.accuracy.tolist() and parts.count.tolist() == plain.count.tolist()
        assert others.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(others[name], value, atol=1e-5, rtol=1e-4, msg=name)
    assert all(parameter.grad is None for parameter in target.parameters())  # it is never trained


def test_the_target_says_once_what_follows_a_token(target, features, monkeypatch):
    """Chains that start side by side predict the same tokens at different depths."""
    drafter = make_drafter(target, injector="low_rank", initializer_range=0.05)
    pack, chains = packed(features[:1]), chains_at(8, 9, 10, num_rolled=3)
    weights, linear, rows = borrow(drafter, target), torch.nn.functional.linear, []
    head = weights.head.clone()

    def counted(states, weight, *bias):
        rows.extend([len(states)] if weight is head else [])
        return linear(states, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    drafter.loss_function = ChainLoss(weights, head, OBJECTIVES["forward_kl"], [1.0] * 4)
    embeds = weights.embed(pack.input_ids.roll(-1))
    drafter(
        pack.taps, embeds, pack.position_ids, chains.starts, pack.document_ids,
        num_rolled=3, labels=true_labels(pack, chains, 4),
    )  # fmt: skip
    # The first depth predicts the tokens 10, 11 and 12. The others, which know their paths, predict 11 to 15.
    assert rows == [3, 5]


def test_gradients_are_those_of_the_loss(target, features):
    """Computed chunk by chunk in the forward, they agree with finite differences."""
    drafter = make_drafter(target, injector="low_rank", initializer_range=0.05)
    pack, chains = packed(features[:1]), chains_at(6, 9, num_rolled=1)
    parts = loss_of(drafter, target, pack, chains, chunk_logits=VOCAB)
    parts.loss.backward()
    for name in ("injector.up.weight", "fuse.weight", "norm.weight", "layers.0.down_proj.weight"):
        parameter = drafter.get_parameter(name)
        place = tuple(int(i) for i in (parameter.grad.abs() == parameter.grad.abs().max()).nonzero()[0])
        values = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                parameter[place] += step
                values.append(loss_of(drafter, target, pack, chains).loss.item())
                parameter[place] -= step
        assert parameter.grad[place].item() == pytest.approx((values[0] - values[1]) / 2e-2, rel=0.05), name


def test_what_is_drawn_from_a_conversation_does_not_depend_on_its_pack(features):
    alone = [sample_chains(packed([chat]), 6, 0.5, [seed]) for chat, seed in zip(features, (3, 4), strict=True)]
    together = sample_chains(packed(features), 6, 0.5, [3, 4], pad_to_multiple_of=4)
    offset = len(features[0].input_ids)
    rolled = [*alone[0].starts[: alone[0].num_rolled], *(alone[1].starts[: alone[1].num_rolled] + offset)]
    assert together.starts[: together.num_rolled][together.real[: together.num_rolled]].tolist() == [
        int(s) for s in rolled
    ]
    assert len(together.starts) % 4 == 0 and int(together.real.sum()) == 12
    assert set(together.starts[together.real].tolist()) <= set(chain_starts(packed(features)).tolist())
    nothing = packed([replace(features[0], answer_mask=torch.zeros(20, dtype=torch.bool))])
    assert not sample_chains(nothing, 6, 0.5, [1]).real.any()


def test_drafted_labels_are_the_targets_word_on_the_drafters_tokens(target, features):
    """Brute force: the target reads each document's prefix and the drawn tokens alone."""
    drafter = make_drafter(target, draft_vocab_size=40, draft_vocab_ids=range(20, 60))
    weights = borrow(drafter, target)
    pack, chains = packed(features, 16), chains_at(9, 31, 12, num_rolled=2)
    torch.manual_seed(0)
    labels = drafted_labels(drafter, target, weights, pack, chains, true_labels(pack, chains, 4))
    last = target.config.num_hidden_layers
    for chain, start in enumerate((9, 31)):
        document = pack.document_ids == pack.document_ids[start]
        prefix = pack.input_ids[document & (torch.arange(len(document)) <= start + 1)]
        drawn = labels.tokens[chain, 1:]
        assert labels.tokens[chain, 0] == pack.input_ids[start + 1] and set(drawn.tolist()) <= set(range(20, 60))
        text = torch.cat([prefix, drawn])[None]
        expected = target(text, output_hidden_states=[last]).hidden_states[last][0, len(prefix) - 1 :]
        torch.testing.assert_close(labels.teacher[labels.rows[chain]], expected, atol=0.05, rtol=0.05)
    assert labels.valid[:2].all() and labels.count.tolist()[1:] == [2, 2, 2]
    assert torch.equal(labels.tokens[2], true_labels(pack, chains, 4).tokens[2])
    loss_of(drafter, target, pack, chains, labels).loss.backward()


def prompts(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(2, VOCAB, (1, 6), generator=torch.Generator().manual_seed(n)) for n in range(count)]


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("sdpa", {}),
        ("eager", {"beam_width": 1}),
        ("sdpa", {"reuse": "ensemble"}),
        ("sdpa", {"num_assistant_tokens": 2}),
    ],
)
def test_parity_holds(attention, options):
    target = make_target(attention)
    drafter = make_drafter(target, draft_vocab_size=60, draft_vocab_ids=range(20, 80))
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    report = parity(drafter, target, prompts(), max_new_tokens=20)
    assert report.passed, report.explain()
    assert len(report.depths) == options.get("num_assistant_tokens", 4)
    assert min(depth.predictions for depth in report.depths) >= 10
    assert drafter.generation_config.reuse == options.get("reuse", "none")


@pytest.mark.parametrize(
    ("planted", "side"),
    [("teacher", "target"), ("parents", "drafter"), ("positions", "drafter"), ("taps", "drafter")],
)
def test_parity_catches_what_is_off_by_one(target, monkeypatch, planted, side):
    """Each of the shifts that training would swallow without a word."""
    drafter = make_drafter(target)
    as_trained = parity_module._as_trained

    def shifted(pack, chains, steps):
        labels = true_labels(pack, chains, steps)
        if planted == "teacher":
            return replace(labels, rows=(labels.rows + 1).clamp(max=len(pack.input_ids) - 1))
        return replace(labels, tokens=labels.tokens.roll(1, dims=1)) if planted == "parents" else labels

    def moved(*args):
        pack, chains = as_trained(*args)
        if planted == "positions":
            pack = replace(pack, position_ids=pack.position_ids.clamp(max=9))
        if planted == "taps":
            pack = replace(pack, taps=pack.taps.roll(1, dims=0))
        return pack, chains

    monkeypatch.setattr(parity_module, "_as_trained", moved)
    report = parity(drafter, target, prompts(), max_new_tokens=20, labels_of=shifted)
    assert not report.passed
    assert f"of the {side}" in report.explain()
    assert "off by one" in report.explain()
