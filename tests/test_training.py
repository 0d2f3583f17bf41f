"""Training sees what decoding sees, and the loss is what it says."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, make_drafter

from hf_hsdraft import HSCandidateGenerator
from hf_hsdraft.training.conversations import TokenizedConversation
from hf_hsdraft.training.features import Features, cache_features
from hf_hsdraft.training.loss import Pack, chain_loss


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


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("injector", ["path", "low_rank"])
def test_training_logits_are_those_of_decoding(target, features, layers, injector):
    """The field's most common bug: a shift between the two. Every depth, second document of a pack, true tokens."""
    drafter = make_drafter(target, num_hidden_layers=layers, injector=injector)
    weights = borrow(drafter, target)
    pack = Pack.of(features).to(torch.device("cpu"), torch.float32)
    offset, start = len(features[0].input_ids), 12
    ids, taps = features[1].input_ids, features[1].taps.float()
    trained = drafter(
        pack.taps,
        weights.embed(pack.input_ids.roll(-1)),
        pack.position_ids,
        starts=torch.tensor([offset + start, 5]),
        document_ids=pack.document_ids,
    )
    generator = HSCandidateGenerator(drafter, weights)
    # As in decoding: the prompt in one piece, then what two rounds accepted.
    for begin, end in ((0, 7), (7, 8), (8, start + 1)):
        generator.read(taps[begin:end], ids[begin + 1 : end + 1], torch.arange(begin, end))
        generator.draft()
    for depth, states in enumerate(trained.hidden_states):
        torch.testing.assert_close(states[0], generator._drafted[depth], atol=1e-3, rtol=1e-3)


def test_loss_is_the_divergence_of_the_true_next_tokens(target, features):
    """Brute force for one chain: a fresh teacher, and the student from its public parts, depth by depth."""
    drafter = make_drafter(target, draft_vocab_size=40)
    weights = borrow(drafter, target)
    pack = Pack.of(features[:1]).to(torch.device("cpu"), torch.float32)
    ids = features[0].input_ids
    start = 9
    parts = chain_loss(drafter, weights, weights.head, pack, torch.tensor([start]), depth_decay=0.5)
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
            expected = (goal.exp() * (goal - logits[0].log_softmax(-1))).sum()
            # Features are kept in bfloat16.
            torch.testing.assert_close(parts.divergence[depth], expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("layers", [1, 2])
def test_padding_changes_neither_loss_nor_gradients(target, features, layers):
    drafter = make_drafter(target, num_hidden_layers=layers, initializer_range=0.05)
    weights = borrow(drafter, target)
    starts = torch.tensor([8, 17, 30, 43])  # the last ones reach past the end of their documents
    results = []
    for multiple in (1, 64):
        pack = Pack.of(features, pad_to_multiple_of=multiple)
        assert pack.input_ids.shape[0] % multiple == 0
        drafter.zero_grad()
        parts = chain_loss(drafter, weights, weights.head, pack.to(torch.device("cpu"), torch.float32), starts)
        parts.loss.backward()
        results.append((parts, drafter.fuse.weight.grad.clone()))
    (plain, gradient), (padded, padded_gradient) = results
    torch.testing.assert_close(padded.divergence, plain.divergence)
    torch.testing.assert_close(padded.accuracy, plain.accuracy)
    torch.testing.assert_close(padded_gradient, gradient, atol=1e-5, rtol=1e-4)
    assert all(parameter.grad is None for parameter in target.parameters())  # it is never trained
