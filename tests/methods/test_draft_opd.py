"""Rounds that are replayed along a text are those of decoding, and chains learn from what became of their drafts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, make_target
from test_trainable import SIZES, borrow, decodes_as_plain, fresh, plan
from training_helpers import run

from hf_hsdraft.methods import on_policy
from hf_hsdraft.methods.on_policy import replay, two_streams
from hf_hsdraft.runtime.prompt_inputs import end_tokens
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import read_features
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.evaluate.parity import _ObservedDrafter
from hf_hsdraft.training.families.trainable import family_of
from hf_hsdraft.training.loop.arguments import training_arguments
from hf_hsdraft.training.loss.chains import Chains, Pack, sample_chains, true_labels, unroll
from hf_hsdraft.training.loss.loss import ChainLoss
from hf_hsdraft.training.loss.objectives import hard_labels

pytestmark = pytest.mark.train
FIELDS = {**SIZES, "hidden-state": {"num_draft_steps": 3, "tree_size": 6, "injector_rank": 8, "draft_vocab_size": 40}}


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=4)


def pack_of(target, drafter, *chats: TokenizedConversation) -> Pack:
    features = read_features(target, drafter.taps_of(target), chats, torch.device("cpu"), torch.float32)
    return Pack.of(features).to(torch.device("cpu"), torch.float32)


def planned(folder, family: str, out: str = "out", **overrides) -> TrainingPlan:
    fields = {"family": family, "drafter": FIELDS[family], "out": str(folder / out), **overrides}
    return replace(plan(folder, "block"), **fields)


def learn(drafter, target, pack: Pack, steps: int) -> None:
    """Lets a drafter learn the beginning of a text by heart, so that some of its drafts are accepted."""
    weights = borrow(drafter, target)
    rows = target.get_output_embeddings().weight.detach()[weights.vocab_ids]
    drafter.loss_function = ChainLoss(weights, rows, hard_labels, [1.0] * 3)
    predictions = family_of(drafter).predictions(drafter, weights)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    chains = sample_chains(pack, 24, 1.0, [0])
    labels = true_labels(pack, chains, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        unroll(drafter, predictions, pack, chains, labels.tokens, labels).loss.loss.backward()
        optimizer.step()
    drafter.loss_function = None


@pytest.mark.parametrize("kind", ["hidden-state", "block", "block, rnn", "eagle3", "peagle"])
def test_rounds_are_those_of_decoding(target, kind):
    """Where rounds of `generate()` start, and how much each accepts."""
    drafter = fresh(target, kind)
    prompt = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(5))
    text = target.generate(prompt, do_sample=False, max_new_tokens=40)[0]
    drafter.generation_config.beam_width, drafter.generation_config.tree_size = 1, 3
    pack = pack_of(target, drafter, TokenizedConversation(text, torch.arange(len(text)) >= 9))
    learn(drafter, target, pack, 40)
    found = replay(drafter, borrow(drafter, target), pack, rows=7)
    observed = _ObservedDrafter(drafter, 9)
    call = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    output = target.generate(prompt, assistant_model=observed, streamer=observed.recorder, **call)
    assert output.sequences[0].tolist() == text.tolist()
    starts = sorted(observed.drafts)
    assert starts[0] == 8  # its root, the first token of the answer, is the target's own
    lengths = output.statistics.accepted_lengths
    assert sum(lengths) > 0 and min(lengths) == 0  # some were accepted, some were not
    late = len(text) - 5  # the last rounds draft only as much as is still wanted
    assert [start for start in found.anchors.tolist() if start < late] == [start for start in starts if start < late]
    expected = [length for start, length in zip(starts, lengths, strict=False) if start < late]
    assert found.accepted[[start for start in starts if start < late]].tolist() == expected


def rounds_by_hand(pack: Pack, drafts: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """Where a round starts, one token after the other: drafts [T, K] are columns of `ids`."""
    anchors, length = [], len(pack.input_ids)
    position = 0
    while position + 2 < length:
        document = int(pack.document_ids[position])

        def written(place: int, document: int = document) -> bool:
            return place < length and bool(pack.answer_mask[place]) and int(pack.document_ids[place]) == document

        if not (written(position + 1) and written(position + 2)):
            position += 1
            continue
        anchors.append(position)
        for column in drafts[position].tolist():
            if not (written(position + 2) and int(ids[column]) == int(pack.input_ids[position + 2])):
                break
            position += 1
        position += 1
    return anchors


def some_rounds(target, kind: str) -> tuple:
    """Two texts, the first with two answers, and drafts that agree with the text at random places."""
    drafter = fresh(target, kind)
    generator = torch.Generator().manual_seed(4)
    weights = borrow(drafter, target)
    ids = weights.vocab_ids[torch.randint(0, len(weights.vocab_ids), (48,), generator=generator)]
    answer = torch.ones(48, dtype=torch.bool)
    answer[[0, 1, 2, 10, 11, 27, 28, 29]] = False
    chats = [TokenizedConversation(ids[part], answer[part]) for part in (slice(0, 27), slice(27, 48))]
    pack = pack_of(target, drafter, *chats)
    columns = torch.randint(0, 40, (48, 3), generator=generator)
    for depth in range(3):
        goals = pack.input_ids[(torch.arange(48) + 2 + depth).clamp(max=47)]
        right = torch.rand(48, generator=generator) < 0.6
        columns[right, depth] = torch.searchsorted(weights.vocab_ids, goals[right])
    return drafter, weights, pack, columns


@pytest.mark.parametrize("kind", ["hidden-state", "block", "eagle3"])
def test_rounds_start_at_each_answer_and_behind_each_rejected_draft(target, kind, monkeypatch):
    drafter, weights, pack, columns = some_rounds(target, kind)
    monkeypatch.setattr(on_policy, "draft", lambda drafter, weights, pack, starts, *_: columns[starts])
    found = replay(drafter, weights, pack)
    expected = rounds_by_hand(pack, columns, weights.vocab_ids)
    assert found.anchors.tolist() == expected and {2, 11, 29} <= set(expected)
    assert 10 < len(expected) < 35
    assert not replay(drafter, weights, replace(pack, answer_mask=pack.answer_mask & False)).anchors.numel()


@pytest.mark.parametrize("kind", ["hidden-state", "block", "eagle3"])
@pytest.mark.parametrize("rejected_drafts", [0, 1, 2, 3])
def test_streams_are_what_was_emitted_and_what_was_rejected(target, kind, rejected_drafts, monkeypatch):
    drafter, weights, pack, columns = some_rounds(target, kind)
    monkeypatch.setattr(on_policy, "draft", lambda drafter, weights, pack, starts, *_: columns[starts])
    end = int(weights.vocab_ids[columns[:, 0].mode().values])
    monkeypatch.setattr("hf_hsdraft.methods.on_policy.end_tokens", lambda target: end_tokens(target) | {end})
    found = replay(drafter, weights, pack)
    starts = found.anchors
    chains, every = (Chains(starts, count, torch.ones(len(starts)) > 0) for count in (len(starts) - 6, len(starts)))
    text, whole = (true_labels(pack, each, 3) for each in (chains, every))
    labels = two_streams(found, target, weights, pack, chains, text, rejected_drafts)
    last, kinds = target.config.num_hidden_layers, set()
    for chain, start in enumerate(starts.tolist()):
        document = pack.document_ids == pack.document_ids[start]
        prefix = pack.input_ids[document & (torch.arange(48) <= start + 1)].tolist()
        drafts = weights.vocab_ids[columns[start]].tolist()
        deep = 3 if chain < chains.num_rolled else 1
        follows = [pack.input_ids[start + 2 + d].item() if whole.valid[chain, d] else None for d in range(3)]
        agree = [a == b for a, b in zip(drafts, follows, strict=True)]
        accepted = len(list(itertools.takewhile(bool, agree)))
        for depth in range(3):
            emitted = depth <= accepted and bool(text.valid[chain, depth])
            assert bool(labels.valid[chain, depth]) == emitted
            known = accepted < 3 and bool(text.valid[chain, accepted])
            before_end = end not in drafts[accepted:depth]
            counted = known and accepted <= depth < min(accepted + rejected_drafts, deep) and before_end
            weight = labels.further.weights[chain, depth].item()
            assert weight == pytest.approx(0.9**depth if counted else 0.0)
            kinds |= {(emitted, counted, depth > accepted)}
            if not (emitted or counted):
                continue
            assert labels.further.columns[chain, depth] == columns[start, depth]
            path = prefix + drafts[:depth]  # what was drafted, which is the text where it was accepted
            assert int(labels.tokens[chain, depth]) == path[-1]
            states = target(torch.tensor([path]), output_hidden_states=[last]).hidden_states[last][0, -1]
            torch.testing.assert_close(labels.teacher[labels.rows[chain, depth]], states, atol=1e-4, rtol=1e-4)
    assert labels.count.sum().item() == pytest.approx(float(labels.valid.sum() + labels.further.weights.sum()))
    assert {(True, False, False), (True, True, False)} <= kinds or not rejected_drafts
    assert ((False, True, True) in kinds) == (rejected_drafts > 1)


OPD = {"data_policy": "draft-opd", "rejected_drafts": 2}


def test_trackers_record_the_options_of_the_policy(tmp_path):
    recorded = training_arguments(tmp_path, OPD, "cpu").to_sanitized_dict()
    assert OPD.items() <= recorded.items() and "method_options" not in recorded


@pytest.mark.train
@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("block", {**OPD, "objective": "total_variation", "depth_decay": 1.0}),
        ("eagle3", {"data_policy": "draft-opd", "objective": "hard_labels", "bf16": True}),
        ("specformer", {"depth_weighting": "d-pace", "objective": "ce_tv", "ce_share": 0.5, "bf16": True}),
        ("hidden-state", {"objective": "lk_hybrid", "data_policy": "mixed", "depth_weighting": "d-pace"}),
        ("hidden-state", {"objective": "jensen_shannon", "data_policy": "student", "activation_checkpointing": True}),
    ],
)
def test_a_run_takes_them_and_its_card_says_so(chatty, tokenizer, tmp_path, family, arguments):
    drafter = run(chatty, tokenizer, planned(tmp_path, family), **arguments)
    recipe = json.loads((tmp_path / "out" / "training_recipe.json").read_text())["training"]["loss"]
    assert arguments.get("objective", "forward_kl") in recipe
    assert f"on {arguments.get('data_policy', 'teacher')} data" in recipe
    assert ("(rejected_drafts 2)" in recipe) == ("rejected_drafts" in arguments)
    assert ("depth weights by d-pace" in recipe) == ("depth_weighting" in arguments)
    assert decodes_as_plain(chatty, drafter)


@pytest.mark.train
def test_a_run_goes_on_with_its_own_options_only_and_an_adapter_is_trained(chatty, tokenizer, tmp_path):
    plan = planned(tmp_path, "hidden-state")
    run(chatty, tokenizer, plan, **OPD)
    for options in ({"rejected_drafts": 1}, {"rejected_drafts": None}):
        with pytest.raises(ValueError, match=f"rejected_drafts: '2' -> '{options['rejected_drafts']}'"):
            run(chatty, tokenizer, plan, **OPD | options)
    with pytest.raises(ValueError, match="depth_weighting='d-pace' is invalid with data_policy='draft-opd'"):
        run(chatty, tokenizer, plan, **OPD | {"depth_weighting": "d-pace"})
    adapted = planned(tmp_path, "hidden-state", "a", drafter={}, init_from=str(tmp_path / "out"), lora=2)
    run(chatty, tokenizer, adapted, data_policy="draft-opd", objective="lk_hybrid")
    assert (tmp_path / "a" / "adapter_model.safetensors").exists()
