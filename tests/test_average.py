"""Averaged drafters: the arithmetic, what is stored beside it, and what is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target

from hf_hsdraft import HSDrafter
from hf_hsdraft.drafter_files import read_json
from hf_hsdraft.training.average import average, average_folders


@pytest.fixture
def pair(target, tokenizer, tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        make_drafter(target, seed=seed, target_name="org/target").save_pretrained(tmp_path / name)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def test_every_weight_is_the_weighted_mean(target):
    one, two = make_drafter(target, seed=1), make_drafter(target, seed=2)
    mean = average([one, two], [1.0, 3.0]).state_dict()
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(mean[name], torch.lerp(tensor, two.state_dict()[name], 0.75))


def test_a_drafter_averaged_with_itself_stays_what_it_is(target):
    one = make_drafter(target)
    same = average([one, one], [0.5, 0.5]).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.state_dict().items())


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


def test_the_recipe_of_the_first_comes_along_its_figures_do_not(target, tokenizer, pair, tmp_path):
    first = tmp_path / "one"
    (first / "training_recipe.json").write_text('{"license": "mit", "training": {"data": "12 chats"}}')
    (first / "figures.json").write_text('{"training": {"history": [{"step": 1, "eval_tau": 9.9}]}}')
    average_folders(pair, [1.0, 1.0], tmp_path / "mean", target, tokenizer)
    recipe = read_json(tmp_path / "mean" / "training_recipe.json")
    assert recipe["license"] == "mit" and recipe["training"]["data"] == "12 chats"
    assert "changed_since" not in recipe
    card = (tmp_path / "mean" / "README.md").read_text(encoding="utf-8")
    assert "12 chats" in card and "0.5 of one" in card and "9.9" not in card


@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ({"target_tap_layers": [0, 1, 2]}, "target_tap_layers"),
        ({"draft_vocab_size": 50}, "draft_vocab"),
        ({"num_hidden_layers": 2}, "shapes"),
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


def test_nothing_is_overwritten_and_other_targets_are_told(target, tokenizer, pair, tmp_path):
    with pytest.raises(FileExistsError, match="not empty"):
        average_folders(pair, [1.0, 1.0], tmp_path / "one", target, tokenizer)
    other = make_target(hidden_size=48)
    with pytest.raises(ValueError):
        average_folders(pair, [1.0, 1.0], tmp_path / "mean", other, tokenizer)
    assert not (tmp_path / "mean").exists()
