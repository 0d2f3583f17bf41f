"""Averaged drafters: the arithmetic, what is stored beside it, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

from hf_hsdraft import HSDrafter
from hf_hsdraft.hub.drafter_files import read_json
from hf_hsdraft.methods.refinement.refinement import PathLM, PathLMSizes, load_refiner, save_refiner
from hf_hsdraft.methods.souping.average import average, average_folders
from hf_hsdraft.training.families.hidden_state import record_target


@pytest.fixture
def pair(target, tokenizer, tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        drafter = make_drafter(target, seed=seed, target_name="org/target")
        record_target(drafter, target, tokenizer, "org/target")
        drafter.save_pretrained(tmp_path / name)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def test_every_weight_is_the_weighted_mean(target):
    """The parts stay as they were."""
    one, two = make_drafter(target, seed=1), make_drafter(target, seed=2)
    mean = average([one, two], [1.0, 3.0])
    for name, tensor in make_drafter(target, seed=1).state_dict().items():
        torch.testing.assert_close(mean.state_dict()[name], torch.lerp(tensor, two.state_dict()[name], 0.75))
    mean.config.target_name, mean.generation_config.tree_size = "another", 99
    assert one.config.target_name != "another" and one.generation_config.tree_size != 99


def test_the_stored_average_loads_and_drafts_and_says_what_it_is(target, tokenizer, prompt, pair, tmp_path):
    out = tmp_path / "mean"
    average_folders(pair, [0.35, 0.65], out, target, tokenizer)
    drafter = HSDrafter.from_pretrained(out)
    assert drafter.config.target_name == "org/target" and drafter.config.target_reference is not None
    recipe = read_json(out / "training_recipe.json")
    assert recipe["training"]["averaged"].startswith("0.35 of one, 0.65 of two")
    assert "0.35 of one" in (out / "README.md").read_text(encoding="utf-8") and str(tmp_path) not in str(recipe)
    call = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(prompt, **call)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **call), plain)


def test_the_first_drafters_refiner_is_that_of_the_average(target, tokenizer, prompt, pair, tmp_path):
    """In a folder, and in the object that `average` returns."""
    ids = torch.arange(VOCAB)
    for name in ("one", "two"):
        save_refiner(PathLM(PathLMSizes(32, VOCAB)), tmp_path / name, ids)
        options = read_json(tmp_path / name / "generation_config.json") | {"refinement": 0.2}
        (tmp_path / name / "generation_config.json").write_text(json.dumps(options))
    average_folders(pair, [0.5, 0.5], tmp_path / "mean", target, tokenizer)
    call = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(prompt, **call)
    parts = [HSDrafter.from_pretrained(name) for name in pair]
    for drafter in (HSDrafter.from_pretrained(tmp_path / "mean"), average(parts, [0.5, 0.5])):
        assert drafter.generation_config.refinement == 0.2
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **call), plain)
    wanted, found = (load_refiner(tmp_path / name, ids) for name in ("one", "mean"))
    assert torch.equal(found.up.weight, wanted.up.weight)


def write_recipe(folder, **recipe):
    (folder / "training_recipe.json").write_text(json.dumps(recipe))


def test_the_card_tells_of_all_parts_and_nothing_that_holds_for_one_only(target, tokenizer, pair, tmp_path):
    write_recipe(tmp_path / "one", license="mit", language=["en"], training={"data": "12 chats"}, commands=["train 1"])
    write_recipe(tmp_path / "two", license="mit", language=["de"], training={"data": "34 chats"})
    (tmp_path / "one" / "figures.json").write_text('{"training": {"history": [{"step": 1, "eval_tau": 9.9}]}}')
    average_folders(pair, [1.0, 1.0], tmp_path / "mean", target, tokenizer)
    recipe = read_json(tmp_path / "mean" / "training_recipe.json")
    assert recipe["license"] == "mit" and recipe["language"] == ["en", "de"]
    assert recipe["training"]["one: data"] == "12 chats" and recipe["training"]["two: data"] == "34 chats"
    card = (tmp_path / "mean" / "README.md").read_text(encoding="utf-8")
    assert "34 chats" in card and "0.5 of one" in card and "9.9" not in card and "train 1" not in card
    write_recipe(tmp_path / "two", license="apache-2.0")
    average_folders([str(tmp_path / "mean"), pair[1]], [1.0, 3.0], tmp_path / "again", target, tokenizer)
    again = read_json(tmp_path / "again" / "training_recipe.json")
    assert "license" not in again and again["training"]["mean: averaged"].startswith("0.5 of one, 0.5 of two")


def test_folders_of_one_name_are_told_apart(target, tokenizer, tmp_path):
    for seed in (1, 2):
        make_drafter(target, seed=seed).save_pretrained(tmp_path / f"run{seed}" / "drafter")
    parts = [str(tmp_path / f"run{seed}" / "drafter") for seed in (1, 2)]
    average_folders(parts, [1.0, 1.0], tmp_path / "mean", target, tokenizer)
    recipe = read_json(tmp_path / "mean" / "training_recipe.json")
    assert recipe["training"]["averaged"].startswith("0.5 of drafter (1), 0.5 of drafter (2)")


def test_a_kill_leaves_nothing_behind_and_nothing_is_overwritten(target, tokenizer, pair, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_hsdraft.methods.souping.average.write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        average_folders(pair, [1.0, 1.0], tmp_path / "mean", target, tokenizer)
    with pytest.raises(FileExistsError, match="not empty"):
        average_folders(pair, [1.0, 1.0], tmp_path / "one", target, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ({"target_tap_layers": [0, 1, 2]}, "target_tap_layers"),
        ({"draft_vocab_size": 50}, "draft_vocab"),
        ({"num_hidden_layers": 2}, "num_roll_layers"),
        ({"intermediate_size": 48}, "shapes"),
        ({"injector": "low_rank"}, "injector"),
    ],
)
def test_drafters_that_do_not_compare_are_refused(target, difference, told):
    with pytest.raises(ValueError, match=told):
        average([make_drafter(target), make_drafter(target, **difference)], [1.0, 1.0])


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_shares_that_make_no_average_are_refused(target, shares):
    with pytest.raises(ValueError, match="positive share"):
        average([make_drafter(target), make_drafter(target)], shares)


def test_another_target_is_refused(target, tokenizer, pair, tmp_path):
    """Of other sizes; of the same, but with other tokens; of the same, but writing otherwise."""
    with pytest.raises(ValueError, match="hidden"):
        average_folders(pair, [1.0, 1.0], tmp_path / "mean", make_target(hidden_size=48), tokenizer)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["one-more"])
    with pytest.raises(ValueError, match=r"one: .*tokens.*--target"):
        average_folders(pair, [1.0, 1.0], tmp_path / "mean", target, other)
    for name in pair:  # as if it had guessed all of its own target's text, which no other one's would be
        config = Path(name) / "config.json"
        fields = read_json(config)
        fields["target_reference"]["drafted"] = 90
        config.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"one: .*fits this target less.*--target"):
        average_folders(pair, [1.0, 1.0], tmp_path / "mean", make_target(seed=7), tokenizer)
    assert not (tmp_path / "mean").exists()
