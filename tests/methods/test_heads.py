"""Heads over the last hidden state draft what their authors' formulas say, in real calls, and are saved as such."""

from __future__ import annotations

import json

import pytest
import torch
from oracles import heads_parity
from oracles.format_parity import PROMPTS, texts_of, tiny_target
from oracles.heads_parity import CASES, TOKENS, _shared_target
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.cache_name import CACHE
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base import auto_drafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.base.registry import TargetInfo
from hf_hsdraft.hub.checkpoint import CachedModel
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint

BY_NAME = {case.name: case for case in CASES}
KINDS = (
    "Medusa, TGI's layout, output layer of the target",
    "Medusa, vLLM's layout, token map, scaled",
    "Hydra",
    "Hydra++",
    "MLPSpeculator, tied, input normed",
    "LSTM speculator",
)


def loaded(name, **fields):
    target = _shared_target()
    drafter = BY_NAME[name].make(target, **fields).loaded()
    return target, drafter


@pytest.mark.parametrize("name", BY_NAME)
def test_drafts_are_those_of_the_authors(name):
    found = heads_parity.parity(BY_NAME[name])
    assert found.difference < 1e-4 and found.rounds > 20


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [{"beam_width": 1}, {"tree_size": 12}, {"num_assistant_tokens": 2}])
def test_the_text_is_that_of_plain_decoding(name, options):
    target, drafter = loaded(name)
    drafter.generation_config.update(**options)
    texts_of(target, drafter)


@pytest.mark.parametrize("name", KINDS)
def test_a_sampled_text_is_that_of_plain_decoding(name):
    target, drafter = loaded(name)
    prompt, call = torch.tensor([PROMPTS[0]]), {"do_sample": True, "max_new_tokens": 20, "temperature": 0.8}
    torch.manual_seed(3)
    plain = target.generate(prompt, **call)
    torch.manual_seed(3)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **call), plain)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_saved_drafter_is_loaded_as_it_was(name, tmp_path):
    _, drafter = loaded(name)
    drafter.save_pretrained(tmp_path, target_name="lmsys/vicuna")
    again = AutoDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again) is type(drafter) and again.config.to_dict() == {
        **drafter.config.to_dict(), "target_name": "lmsys/vicuna"}  # fmt: skip
    assert all(torch.equal(again.state_dict()[name], each) for name, each in drafter.state_dict().items())


def test_a_long_text_goes_on_from_an_earlier_call():
    target, drafter = loaded("LSTM speculator")
    prompt = torch.tensor([PROMPTS[1]])
    first = target.generate(prompt, assistant_model=drafter, max_new_tokens=8, return_dict_in_generate=True)
    again = target.generate(first.sequences, assistant_model=drafter, max_new_tokens=8, **{CACHE: first[CACHE]})
    assert torch.equal(again, target.generate(prompt, max_new_tokens=16))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("Hydra", {"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch='prefix-mlp'.*expected 'mlp'"),
        ("LSTM speculator", {"tie_lstm_embs": False}, "tie_lstm_embs=False"),
        ("MLPSpeculator", {"n_predict": 3}, "unknown: speculator.emb.3.weight"),
        ("Medusa, vLLM's layout", {"original_lm_head": True}, "unknown: medusa_heads.lm_heads.1.weight"),
        ("MLPSpeculator", {"use_more": True}, "use_more=true"),
        ("Medusa, vLLM's layout", {"vocab_size": TOKENS + 1}, f"have {TOKENS} rows, .*expected as many, .*token_map"),
    ],
)
def test_files_that_are_something_else_are_refused(name, change, told, tmp_path):
    BY_NAME[name].make(_shared_target()).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=told):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_layer_of_other_heads_than_the_targets_is_refused():
    _, drafter = loaded("Hydra++")
    other = tiny_target(vocab_size=TOKENS, num_key_value_heads=1)
    with pytest.raises(DraftingRefused, match="this drafter's layer"):
        other.generate(torch.tensor([PROMPTS[0]]), assistant_model=drafter, max_new_tokens=4)


def test_a_session_keeps_its_targets_positions_while_others_use_the_drafter():
    target, drafter = loaded("Hydra++")
    rope = {"rope_type": "default", "rope_theta": 2.0}
    other, ids = tiny_target(vocab_size=TOKENS, rope_parameters=rope), torch.arange(2, 14)
    states = target(ids[None], output_hidden_states=True).hidden_states[-1][0]

    def drafted(between):
        session = drafter.session(Call(target, 1, DraftOptions.of(drafter)))
        between()
        session.observe([Accepted(0, [int(ids[-1])], states[:-1], torch.arange(11), ids[1:])])
        ask = Ask(0, int(ids[-1]), 1, 1, 1)
        return session.expansion([ask], 1, session.options_for(ask))(1, ids[None, -1:], None)[0]

    alone = drafted(lambda: None)
    assert torch.equal(drafted(lambda: drafter.check(other)), alone)
    assert torch.equal(drafted(lambda: drafter.session(Call(other, 1, DraftOptions.of(drafter)))), alone)


@pytest.mark.parametrize(
    ("wrong", "told"), [(0.5, "integers"), (TOKENS, f"tokens below {TOKENS}, each once"), (0, "tokens .*, each once")]
)
def test_a_list_of_drafted_tokens_is_checked(wrong, told, tmp_path):
    BY_NAME["Medusa, vLLM's layout, token map, scaled"].make(_shared_target()).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    listed = weights["token_map"].tolist()
    weights["token_map"] = torch.tensor([wrong, wrong, *listed[2:]])
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"token_map=.* is invalid: expected {told}"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_drafter_of_another_target_is_refused():
    target, drafter = loaded("MLPSpeculator")
    object.__setattr__(drafter.config, "vocab_size", TOKENS + 1)
    with pytest.raises(Exception, match="vocab_size=64, the drafter expects 65"):
        drafter.check(target)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Drafters in a cache whose cards name the target, one of them of a kind that does not draft here."""
    target, models = _shared_target(), []
    for name, change in (("MLPSpeculator", {}), ("Hydra", {"hydra_head_arch": "prefix-mlp"}), ("Hydra", {})):
        folder = tmp_path / f"{name}{len(models)}"
        folder.mkdir()
        BY_NAME[name].make(target).save(folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change, "base_model_name_or_path": None}))
        (folder / "README.md").write_text("---\nbase_model: org/target\n---\n")
        checkpoint = AnyCheckpoint(f"user/{folder.name}", folder, json.loads(path.read_text()))
        models.append(CachedModel("0", ("main",), checkpoint))
    monkeypatch.setattr(auto_drafter, "cached_models", lambda: models)
    monkeypatch.setattr(target, "name_or_path", "org/target")
    return target


def test_find_says_how_a_file_drafts_and_why_another_does_not(cached, monkeypatch):
    monkeypatch.setattr(AnyCheckpoint, "tensors", None)  # no weights are read
    found, _ = auto_drafter.find(TargetInfo.of_model(cached, local_files_only=True), local_files_only=True)
    told = {each.name: each for each in found if each.name.startswith("user/")}
    assert (
        list(told)[-1] == "user/Hydra1" and "cannot be loaded: hydra_head_arch='prefix-mlp'" in told["user/Hydra1"].use
    )
    assert told["user/MLPSpeculator0"].kind == "MLPSpeculatorDrafter (MLPSpeculator)"
    assert told["user/MLPSpeculator0"].drafts == "trees or chains, one depth after the other"
    assert all(each.drafts.startswith("trees or chains, ") for each in found if not each.problem)  # n-grams too
    assert told["user/MLPSpeculator0"].bytes and not told["user/Hydra2"].problem


@pytest.mark.parametrize("name", KINDS)
def test_info_says_whether_and_how_it_drafts(name, tmp_path, monkeypatch):
    BY_NAME[name].make(_shared_target()).save(tmp_path)
    monkeypatch.setattr(AnyCheckpoint, "tensors", None)  # no weights are read
    told = describe(str(tmp_path))["drafter"]
    at_once = "all depths in one forward" if "Medusa" in name else "one depth after the other"
    assert told["drafts here"] == "yes" and told["drafts"] == f"trees or chains, {at_once}"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": True}))
    told = describe(str(tmp_path))["drafter"]
    assert told["drafts here"] == "no" and "more=true" in told["cannot be loaded"]


@pytest.mark.parametrize(
    "name", ["Medusa, TGI's layout, output layer of the target", "Hydra", "MLPSpeculator, tied, input normed"]
)
def test_info_tries_heads_on_a_target(name, tmp_path, own_tokenizer):
    target = _shared_target()
    for each in (target, own_tokenizer):
        each.save_pretrained(tmp_path / "target")
    (tmp_path / "heads").mkdir()
    BY_NAME[name].make(target).save(tmp_path / "heads")
    command = ["info", str(tmp_path / "heads"), "--target", str(tmp_path / "target")]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0 and f"{tmp_path / 'target'} fits: its sizes are the drafter's" in done.output
