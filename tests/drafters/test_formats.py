"""Drafters in formats of other projects, as the commands, a name and `attach` take them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import make_target
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CausalLMDrafter, EagleDrafter, attach
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.base.formats import formats
from hf_hsdraft.drafters.block.drafter import BlockDrafter
from hf_hsdraft.drafters.eagle.configuration import EagleConfig
from hf_hsdraft.hub.checkpoint import Checkpoint

GREEDY = {"max_new_tokens": 16, "do_sample": False}
KINDS = ["block", "eagle", "language model"]


@pytest.fixture(scope="module")
def target():
    return make_target(pad_token_id=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target, tokenizer):
    """Folders of the target and of a drafter of each kind."""
    made = {name: tmp_path_factory.mktemp("folders") / name.replace(" ", "-") for name in ("target", *KINDS)}
    torch.manual_seed(0)
    target.save_pretrained(made["target"])
    tokenizer.save_pretrained(made["target"])
    BlockDrafter.for_target(target, block_size=4, num_hidden_layers=1).save_pretrained(made["block"])
    EagleDrafter(EagleConfig.for_target(target)).save_pretrained(made["eagle"])
    CausalLMDrafter(make_target(seed=1), tokenizer).save_pretrained(made["language model"])
    return {name: str(folder) for name, folder in made.items()}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exception is None, result.exception
    return " ".join(result.output.split())


def test_info_says_what_a_drafter_of_any_format_is(folders):
    said = run("info", folders["block"])
    assert "format: speculators (dflash, dflash2, dspark)" in said and "block_size: 4" in said and "MB" in said
    assert "aux_hidden_state_layer_ids: [" in said
    said = run("info", folders["eagle"])
    assert "format: speculators eagle3 and peagle" in said and "target_hidden_size: 32" in said
    said = run("info", folders["language model"])
    assert "format: causal language model" in said and "reads: the text alone" in said
    assert "vocab_size: 97" in said and "num_assistant_tokens: 5" in said


def test_info_of_something_else_names_the_formats(target, tmp_path):
    target.base_model.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert "is no drafter of a known format" in str(result.exception)
    assert all((form.name in str(result.exception)) == form.loads for form in formats())


def test_every_format_describes_what_it_recognises(folders):
    for kind in KINDS:
        checkpoint = Checkpoint.open(folders[kind])
        found = [form for form in formats() if form.matches(checkpoint)]
        assert found and all(
            isinstance(text, str) and text.isprintable()
            for pair in found[0].describe(checkpoint).items()
            for text in pair
        )


@pytest.mark.parametrize("kind", KINDS)
def test_commands_decode_with_drafters_of_any_format(kind, folders):
    pair = "--target", folders["target"], "--drafter", folders[kind]
    said = run("check", folders[kind], folders["target"], "--max-new-tokens", "8")
    wanted = "right in training right in decoding"  # all of them can be trained
    assert wanted in " ".join(said.split())
    assert " ".join(said.split()).endswith("depths") and "passed: training and decoding agree at all" in said
    run("bench", "--variants", "default,chain,tree24x6", "--max-new-tokens", "4", "--limit", "1", *pair)
    assert "same text yes" in run("demo", "w1 w2 w3", "--max-new-tokens", "4", *pair)


def test_several_drafters_of_different_kinds_are_compared(folders):
    names = [argument for kind in KINDS for argument in ("--drafter", folders[kind])]
    said = run("bench", "--variants", "tree24x6", "--max-new-tokens", "4", "--limit", "1", "--target",
               folders["target"], *names)  # fmt: skip
    assert "tree24x4" in said or ("tree24x3" in said and "tree24x6" in said)


def test_commands_refuse_a_language_model_with_another_tokenizer(folders, tokenizer, tmp_path):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<one>"])
    vocabulary = json.loads(other.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"]["seven"] = vocabulary["model"]["vocab"].pop("w7")
    CausalLMDrafter(make_target(seed=1), tokenizer).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    pair = "--target", folders["target"], "--drafter", str(tmp_path)
    for command in (["demo", "w1 w2"], ["bench", "--limit", "1"]):
        result = CliRunner().invoke(app, [*command, *pair])
        assert "tokenizer is not the target's: 1 of 98 token ids" in str(result.exception)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_and_an_attached_name_draft(kind, folders, target, prompt):
    plain = target.generate(prompt, **GREEDY).tolist()
    assert target.generate(prompt, **GREEDY, assistant_model=folders[kind]).tolist() == plain
    with attach(target, folders[kind]) as attachment:
        assert target.generate(prompt, **GREEDY).tolist() == plain
    assert attachment.statistics.calls == 1 and not attachment.statistics.stepped_aside


@pytest.mark.parametrize("kind", ["block", "eagle"])
@pytest.mark.parametrize("model_type", [None, "speculator_model"])  # earlier versions wrote one
def test_a_drafter_takes_the_place_of_a_former_one(kind, model_type, folders, tmp_path):
    drafter = AutoDrafter.from_pretrained(folders[kind])
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type} if model_type else config))
    assert torch.equal(AutoDrafter.from_pretrained(tmp_path).fc.weight, drafter.fc.weight)
    for name in ("model-00001-of-00002.safetensors", "figures.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists() and not (tmp_path / "figures.json").exists()
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_drafters_are_exported_as_others_read_them(kind, folders, tmp_path):
    run("export", folders[kind], "--to", "speculators", "--out", str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_model_type"]
    assert written == {"block": "dspark", "eagle": "eagle3"}[kind]
    before, after = (AutoDrafter.from_pretrained(folder) for folder in (folders[kind], tmp_path / "out"))
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])
    with pytest.raises(ValueError, match=r"cannot be written in the format 'other': .* speculators only"):
        after.export("other", tmp_path / "again")
    result = CliRunner().invoke(app, ["export", folders[kind], "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
