"""FlashMap drafters: read unchanged, drafting what their authors' class drafts from the same noise."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import NewTokens, as_plain, edited, make_target
from family_helpers import assert_same_tree, drafts, make_flashmap, session_of
from oracles.flashmap_parity import CASES, parity
from oracles.format_parity import Case
from safetensors.torch import load_file, save_file
from session_helpers import news, padded

from hf_hsdraft import AutoDrafter, BlockDrafter
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods import flashmap
from hf_hsdraft.methods.flashmap import FlashMapDrafter, PairedAttention, embedded

CLOSE, TEXT = 1e-4, list(range(5, 15))


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=6)


def first_tree(drafter, target, **options):
    drafter.generation_config.update(**options)
    session = session_of(drafter, target)
    session.observe([news(drafter, target, TEXT, 0, len(TEXT) - 1)])
    return drafts(session, {0: TEXT[-1]})[0]


def test_an_embedding_without_a_table_is_read_token_by_token():
    target = make_target()
    target.set_input_embeddings(NewTokens(target.get_input_embeddings()))
    drafter, ids = make_flashmap(target), torch.tensor([TEXT])
    assert sum(as_plain(target, drafter, ids, max_new_tokens=12).statistics.drafted_nodes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_drafts_are_those_of_the_authors_class(case):
    pytest.importorskip("flashmap")
    found = parity(case, every=6)
    assert found.difference < CLOSE
    assert found.rounds > 20 and found.rejected > 0 and found.accepted > 0


@pytest.mark.parametrize("change", [
    {"target_layer_ids": [1, 3, 5]}, {"rope_theta": 500.0}, {"time_scale": 900.0}, {"num_steps": 2},
    {"layer_norm_eps": 0.1}, {"qk_norm_eps": 0.1}, {"rms_norm_eps": 0.1}, {"noise_gate": "constant", "num_steps": 2},
])  # fmt: skip
def test_a_field_that_is_read_wrongly_drafts_something_else(change):
    pytest.importorskip("flashmap")

    def make(target):
        reference = CASES[0].make(target)

        def save(folder) -> None:
            reference.save(folder)
            edited(folder, **change)

        return replace(reference, save=save)

    assert parity(Case("changed", make), 6).difference > 10 * CLOSE


def test_the_authors_class_loads_what_is_saved_here(target, tmp_path):
    package = pytest.importorskip("flashmap")
    drafter = make_flashmap(target)
    drafter.save_pretrained(tmp_path)
    model, info = package.FlashMapDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(each, drafter.state_dict()[name]) for name, each in model.state_dict().items())
    assert list(model.config.target_layer_ids) == [0, 2] and model.config.block_size == drafter.num_draft_steps


def test_neighbouring_channels_turn_together():
    """Against complex numbers: the score of a query and a key depends on their distance alone, and is that one."""
    torch.manual_seed(0)
    sizes = make_flashmap(make_target()).config.sizes
    attention, size = PairedAttention(sizes), sizes.head_dim
    x, place = torch.randn(2, sizes.hidden_size), torch.tensor([3.0, 10.0])
    angles = place[:, None] * 50.0 ** (-torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    heads = [part(x).unflatten(-1, (-1, size)) for part in (attention.q_proj, attention.k_proj)]
    normed = [each * torch.rsqrt(each.pow(2).mean(-1, keepdim=True) + sizes.rms_norm_eps) for each in heads]
    query, key = (torch.view_as_complex(each.unflatten(-1, (-1, 2))) * turn for each in normed)
    rope = (torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin())
    found = torch.einsum("nhd,mhd->hnm", attention.queries(x, rope), attention.keys(x, rope))
    torch.testing.assert_close(found, torch.einsum("nhd,mhd->hnm", query, key.conj()).real)


def test_saved_and_loaded_it_drafts_the_same(target, tmp_path):
    drafter = make_flashmap(target)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert isinstance(loaded, FlashMapDrafter) and loaded.config == drafter.config
    assert_same_tree(first_tree(drafter, target), first_tree(loaded, target))


def test_more_jumps_draft_something_else_and_the_same_text(target):
    one, two = (first_tree(make_flashmap(target), target, flow_steps=steps) for steps in (None, 2))
    assert one.scores != two.scores
    drafter = make_flashmap(target)
    drafter.generation_config.flow_steps = 2
    as_plain(target, drafter, padded(3), max_new_tokens=12)
    drafter.generation_config.flow_steps = 5
    with pytest.raises(ValueError, match="flow_steps=5 is invalid: jump_grids has times for 1, 2"):
        target.generate(**padded(1), assistant_model=drafter, max_new_tokens=4)


def test_sums_of_embeddings_are_made_once_and_again_after_a_change(target, monkeypatch):
    made, target = [], copy.deepcopy(target)

    def noting(states, embed):
        made.append(states.shape)
        return embedded(states, embed)

    monkeypatch.setattr(flashmap, "embedded", noting)
    drafter = make_flashmap(target)
    before, again = first_tree(drafter, target), first_tree(drafter, target)
    assert_same_tree(before, again)
    assert len(made) == 1
    with torch.no_grad():
        target.get_input_embeddings().weight.mul_(2.0).add_(0.1)
    after, fresh = first_tree(drafter, target), first_tree(drafter, copy.deepcopy(target))
    assert_same_tree(after, fresh)
    assert len(made) == 3 and after.scores != before.scores


@pytest.fixture
def saved(target, tmp_path):
    make_flashmap(target).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("change", "message"), [
    ({"vocab_size": None}, "no vocab_size"),
    ({"target_layer_ids": [2, 0]}, r"target_layer_ids=\[2, 0\].*ascending"),
    ({"num_attention_heads": 5}, "num_attention_heads=5"),
    ({"num_steps": 7}, "num_steps=7 is invalid: jump_grids has times for 1, 2"),
    ({"jump_grids": {"1": [0.0, 0.5]}}, "jump_grids.*from 0 to 1"),
    ({"jump_grids": {"1": 1.0}}, "jump_grids.*lists of times"),
    ({"noise_gate": "learned"}, "noise_gate='learned'.*jump, constant"),
    ({"a_new_switch": True}, "a_new_switch=true"),
    ({"hidden_size": 48}, r"fc.weight \[24, 64\] instead of \[48, 64\]"),
])  # fmt: skip
def test_wrong_files_are_errors_that_say_what_is_wrong(saved, change, message):
    edited(saved, **change)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(saved)


def test_unknown_tensors_are_refused(saved):
    tensors = load_file(saved / "model.safetensors")
    save_file({**tensors, "second_head.weight": torch.ones(2)}, saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown: second_head\.weight"):
        AutoDrafter.from_pretrained(saved)


def test_other_classes_targets_and_formats_are_refused(saved, target):
    with pytest.raises(ValueError, match="format FlashMap, not a BlockDrafter"):
        BlockDrafter.from_pretrained(saved)
    drafter = FlashMapDrafter.from_pretrained(saved)
    with pytest.raises(DraftingRefused, match="reads its hidden states"):
        drafter.check(make_target(num_hidden_layers=2))
    with pytest.raises(ValueError, match="cannot be written in the format 'speculators'"):
        drafter.export("speculators", saved / "out")
    assert json.loads((saved / "config.json").read_text())["model_type"] == "flashmap"
