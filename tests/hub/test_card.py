"""A card holds what is in the files beside it, says so where something was not measured, and is valid on the Hub."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from conftest import make_drafter
from huggingface_hub import ModelCard
from transformers import GenerationConfig

from hf_hsdraft import HSDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.cli.hub import enter_benchmarks
from hf_hsdraft.hub.model_card import render_card, write_card

ROW = {"tau": 2.5, "speed_up": 1.25, "tokens_per_second": 30.0, "identical": 3, "ties": 1, "divergent": 0}


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_drafter(target, target_name="org/target", target_revision="a" * 40).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "drafter"))


def report(folder, name="bench", changed=(), **changes):
    """Writes a report of `hsdraft bench`, with `changed` settings and other changes."""
    digest = HSDrafter.from_pretrained(folder).config.weights_digest
    options = {"beam_width": 5, "tree_size": 16, "num_assistant_tokens": 4}
    settings = {
        "target": "target",
        "prompts": "questions.jsonl",
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "processor": "2 cores of a machine",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "questions": 4,
        "max_new_tokens": 64,
        "command": "hsdraft bench --prompts questions.jsonl",
        "variants": {"tree": options},
        **dict(changed),
    }
    document = {
        "settings": settings,
        "weights": {"tree": digest},
        "summary": {"plain": {**ROW, "tau": 1.0}, "tree": ROW, "lookup": {**ROW, "tau": 1.125}},
        "by_category": {
            name: {"math": ROW, "prose": {**ROW, "tau": 1.5, "speed_up": 0.875}} for name in ("tree", "lookup")
        },
        **changes,
    }
    path = folder.parent / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


def test_a_card_without_figures_has_visible_gaps_and_valid_metadata(folder):
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert data.base_model == "org/target" and {"hsdraft", "speculative-decoding"} <= set(data.tags)
    # The Hub would show how to load a drafter as a text generator of transformers, which does not work.
    assert data.to_dict()["library_name"] == "hf_hsdraft" and "pipeline_tag" not in data.to_dict()
    assert "arxiv:2602.21224" in data.tags and "https://arxiv.org/abs/2602.21224" in card.text
    assert data.eval_results is None and data.license is None
    assert "Speed: not measured" in card.text and "Acceptance of chains: not measured" in card.text
    assert "No recipe is recorded" in card.text
    assert "a" * 40 in card.text  # the target's revision
    for route in ("AutoDrafter.from_pretrained(", "trust_remote_code=True)", "custom_generate="):
        assert route in card.text


@pytest.mark.parametrize("module", ["custom_generate/hub_entry", "hub_entry", "modeling_hsdraft", "own_drafter"])
def test_a_card_tells_whether_the_code_needs_the_package(folder, module):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = f"{module}.HSDrafter"
    (folder / "config.json").write_text(json.dumps(config))
    write_card(folder, "user/name")
    card = (folder / "README.md").read_text()
    assert ("with transformers and torch alone" in card) == (module != "own_drafter")  # "modeling_hsdraft" as of old
    assert ("by the code in this repository and `hf_hsdraft`" in card) == (module == "own_drafter")


def test_every_figure_of_a_card_comes_from_its_files(folder):
    history = [
        {"step": 1, "eval_loss": 9.0, "eval_tau": 1.1},
        {"step": 2, "eval_loss": 1.25, "eval_tau": 2.75, "eval_accuracy_1": 0.75, "eval_acceptance_1": math.nan},
    ]
    recipe = {
        "license": "apache-2.0",
        "language": ["en"],
        "training": {"data": "12 | chats\nin all"},
        "limits": ["short"],
    }
    (folder / "figures.json").write_text(json.dumps({"training": {"history": history, "calibration": None}}))
    (folder / "training_recipe.json").write_text(json.dumps(recipe))
    enter_benchmarks(folder, [report(folder)])
    write_card(folder, "user/name")
    card = ModelCard.load(folder / "README.md")
    results = {(result.metric_type, result.metric_value) for result in card.data.eval_results}
    assert results == {("tau", 2.5), ("speed_up", 1.25)}  # ours only
    assert card.data.license == "apache-2.0" and card.data.model_name == "name"
    assert (
        "| tree (16 nodes, 4 deep) | 2.50 | 1.25 | 30.0 | 3 of 4 |" in card.text
        and "lookup (for comparison) | 1.12 |" in card.text
    )
    assert "math 2.50 (1.25), prose 1.50 (0.88)" in card.text and "(speed_up.png)" in card.text
    assert (
        "hsdraft bench --prompts questions.jsonl --drafter user/name" in card.text
        and "2 cores of a machine" in card.text
    )
    assert "tau 2.75" in card.text and "| 1 | 0.75 | not measured |" in card.text
    assert "| data | 12 \\| chats in all |" in card.text and "- short" in card.text
    assert (folder / "speed_up.png").read_bytes().startswith(b"\x89PNG")


def chain_report(folder):
    weights = HSDrafter.from_pretrained(folder).config.weights_digest
    names = [f"chain{length}" for length in (2, 10)]  # as text 10 would come before 2
    lengths = dict(zip(names, (1.75, 2.0), strict=True))
    rows = {name: {**ROW, "acceptance_length": length, "speed_up": length} for name, length in lengths.items()}
    groups = {name: {"math": {**row, "acceptance_length": 3.0}, "prose": row} for name, row in rows.items()}
    rounds = {"chain10": {"depth_1": 0.5, "depth_2": 0.25}}
    measured = dict.fromkeys(names, weights)
    return report(folder, "chains", summary=rows, by_category=groups, round=rounds, weights=measured)


def test_chains_are_reported_by_length_and_category_and_by_depth(folder):
    enter_benchmarks(folder, [report(folder)])
    enter_benchmarks(folder, [chain_report(folder)], keep=True)
    write_card(folder, "user/name")
    card = ModelCard.load(folder / "README.md")
    table = "| acceptance length | k = 2 | k = 10 |\n| --- | --- | --- |\n| all prompts | 1.75 | 2.00 |"
    assert f"{table}\n| math | 3.00 | 3.00 |\n| prose | 1.75 | 2.00 |" in card.text
    assert "| accepted, share of all rounds | 0.50 | 0.25 | 0.00 |" in card.text
    assert "| accepted, if all before were | 0.50 | 0.50 | 0.00 | not measured |" in card.text
    assert "1 + accepted drafted tokens / rounds" in card.text  # the definition
    assert "| tree (16 nodes, 4 deep) | 2.50 |" not in card.text  # the same command: the later report stays
    assert "Speed: not measured" in card.text and not (folder / "speed_up.png").exists()
    results = [(result.metric_type, result.metric_value) for result in card.data.eval_results]
    assert results == [("acceptance_length", 1.75), ("acceptance_length", 2.0)]
    listed = [title.split(",")[0] for title in describe(str(folder))["figures"] if title.startswith("chain")]
    assert listed == ["chain2", "chain10"]


def test_reports_are_kept_beside_those_of_other_commands(folder):
    command = "hsdraft bench --prompts questions.jsonl --limit 4"
    other = report(folder, "other", {"command": command})
    enter_benchmarks(folder, [other])
    assert len(enter_benchmarks(folder, [chain_report(folder)], keep=True)) == 2
    assert len(enter_benchmarks(folder, [chain_report(folder)], keep=True)) == 2
    write_card(folder, "user/name")
    text = (folder / "README.md").read_text()
    assert "| tree (16 nodes, 4 deep) | 2.50 |" in text and "| all prompts | 1.75 | 2.00 |" in text
    assert "Speed: not measured" not in text and "chains: not measured" not in text
    assert len(enter_benchmarks(folder, [other])) == 1


def test_info_tells_reports_of_one_variant_apart(folder):
    sampled = {"do_sample": True, "temperature": 1.0, "seed": 0}
    settings = [{}, {**sampled, "top_k": 0}, {**sampled, "top_k": 50}, {"processor": "another"}]
    reports = [
        report(
            folder,
            str(number),
            {**changes, "command": f"hsdraft bench {number}"},
            summary={"plain": ROW, "tree": {**ROW, "tau": number + 1}},
        )
        for number, changes in enumerate(settings)
    ]
    enter_benchmarks(folder, reports)
    figures = json.loads((folder / "figures.json").read_text())
    history = [{"eval_tau": 3.0685714285714285, "step": 1}]
    (folder / "figures.json").write_text(json.dumps({**figures, "training": {"history": history, "calibration": None}}))
    machine = "speed-up 1.25 (2 cores of a machine, threads: 2)"
    end = "4 prompts of questions.jsonl"
    assert describe(str(folder))["figures"] == {
        f"tree, float32, 64 tokens, greedy, {end}": f"tau 1.00, {machine}",
        f"tree, float32, 64 tokens, temperature 1.0, top-k 0, seed 0, {end}": f"tau 2.00, {machine}",
        f"tree, float32, 64 tokens, temperature 1.0, top-k 50, seed 0, {end}": f"tau 3.00, {machine}",
        f"tree, float32, 64 tokens, greedy, {end} (2)": "tau 4.00, speed-up 1.25 (another, threads: 2)",
        "tau on held-out conversations": "3.07",
    }


def test_figures_of_other_weights_are_refused_and_not_carried_along(folder, target, tmp_path_factory):
    with pytest.raises(ValueError, match="other weights"):
        enter_benchmarks(folder, [report(folder, weights={"tree": {"model.safetensors": "0" * 64}})])
    with pytest.raises(ValueError, match="no report"):
        enter_benchmarks(folder, [folder / "config.json"])
    enter_benchmarks(folder, [report(folder)])
    (folder / "training_recipe.json").write_text(json.dumps({"license": "mit", "training": {"data": "12 chats"}}))
    write_card(folder, "name")
    copy = tmp_path_factory.mktemp("copy")
    # The same weights elsewhere, in other files and a wider dtype: figures come along.
    HSDrafter.from_pretrained(folder).double().save_pretrained(copy, max_shard_size="20KB")
    card = (copy / "README.md").read_text()
    assert "| tree (16 nodes, 4 deep) | 2.50 |" in card and (copy / "speed_up.png").exists()
    assert "12 chats" in card and "changed after" not in card
    changed = HSDrafter.from_pretrained(copy)
    changed.fuse.weight.data.add_(1.0)
    changed.save_pretrained(copy)
    assert not (copy / "figures.json").exists() and not (copy / "speed_up.png").exists()
    card = (copy / "README.md").read_text()
    assert "2.50" not in card and "license: mit" in card and "12 chats" in card and "changed after" in card


def test_a_card_that_somebody_wrote_is_kept(folder, target, tmp_path_factory):
    (folder / "README.md").write_text("---\nlicense: mit\n---\nmy own words")
    write_card(folder, "name")
    make_drafter(target, seed=5).save_pretrained(folder)
    assert (folder / "README.md").read_text().endswith("my own words")
    copy = tmp_path_factory.mktemp("copy")
    HSDrafter.from_pretrained(folder).save_pretrained(copy)
    assert (copy / "README.md").read_text().endswith("my own words")


def test_names_in_a_card_cannot_break_out_of_it(target, tmp_path):
    name = "org/x\"); import os; os.system('id'); (\": [y] - #'` | <b>"
    make_drafter(target, target_name=name).save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license is None and card.data.to_dict()["library_name"] == "hf_hsdraft"
    for code in re.findall(r"^```python\n(.*?)^```", card.text, re.MULTILINE | re.DOTALL):
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        assert {ast.unparse(call.func) for call in calls} <= {
            "AutoTokenizer.from_pretrained",
            "AutoModelForCausalLM.from_pretrained",
            "AutoModel.from_pretrained",
            "AutoDrafter.from_pretrained",
            "model.generate",
            "tokenizer",
        }


def test_a_card_states_the_options_that_decode(target, tmp_path):
    drafter = make_drafter(target)
    drafter.generation_config.tree_size, drafter.generation_config.num_assistant_tokens = 12, 3
    drafter.save_pretrained(tmp_path)
    assert "| draft | 3 deep, 12 nodes |" in (tmp_path / "README.md").read_text()
    assert HSDrafter.from_pretrained(tmp_path, tree_size=7).generation_config.tree_size == 7
    drafter.generation_config.tree_size = 0
    with pytest.raises(ValueError, match="tree_size=0"):
        drafter.save_pretrained(tmp_path)


def test_documents_come_from_where_a_drafter_was_loaded_and_not_from_where_it_goes(target, tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        make_drafter(target, seed=seed).save_pretrained(tmp_path / name)
        recipe = {"license": name, "training": {"data": f"{name} chats"}}
        (tmp_path / name / "training_recipe.json").write_text(json.dumps(recipe))
    HSDrafter.from_pretrained(tmp_path / "two").save_pretrained(tmp_path / "one")
    card = (tmp_path / "one" / "README.md").read_text()
    assert "two chats" in card and "one chats" not in card and "changed after" not in card
    make_drafter(target, seed=3).save_pretrained(tmp_path / "two")  # of no origin: it inherits nothing
    assert "No recipe is recorded" in (tmp_path / "two" / "README.md").read_text()


def test_options_given_to_loading_go_before_the_stored_ones(folder):
    given = GenerationConfig(num_assistant_tokens=2, tree_size=3)
    drafter = HSDrafter.from_pretrained(folder, generation_config=given)
    assert (drafter.generation_config.num_assistant_tokens, drafter.generation_config.tree_size) == (2, 3)
    drafter = HSDrafter.from_pretrained(folder, generation_config=given, num_assistant_tokens=1, tree_size=9)
    assert (drafter.generation_config.num_assistant_tokens, drafter.generation_config.tree_size) == (1, 9)
    assert (given.num_assistant_tokens, given.tree_size) == (2, 3)
    (folder / "generation_config.json").write_text(json.dumps({"__class__": "str", "watermarking_config": 5}))
    HSDrafter.from_pretrained(folder).save_pretrained(folder)


def test_a_targets_path_on_this_machine_is_not_published(target, tmp_path):
    (tmp_path / "secret" / "model").mkdir(parents=True)
    make_drafter(target, target_name=str(tmp_path / "secret" / "model")).save_pretrained(tmp_path / "out")
    text = "".join(path.read_text() for path in (tmp_path / "out").glob("*.*") if path.suffix in (".md", ".json"))
    assert "secret" not in text and '"target_name": "model"' in text
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model is None


def _trained(folder, training, **further):
    history = [{"eval_loss": 1.0, "eval_tau": 2.0, "eval_accuracy_1": 0.5}]
    (folder / "figures.json").write_text(json.dumps({"training": {"history": history}}))
    (folder / "training_recipe.json").write_text(json.dumps({"training": training, **further}))
    return render_card(folder, "org/drafter")


def test_only_a_drafter_that_started_from_another_may_have_learned_the_held_out_conversations(folder):
    sentence = "may have been trained on these conversations"
    assert sentence not in _trained(folder, {"steps": "8"})
    assert sentence in _trained(folder, {"steps": "8", "started from": "org/first"})
    assert sentence in _trained(folder, {"a: steps": "8", "a: started from": "org/first"})
    assert sentence in _trained(folder, {"steps": "8"}, commands=["hsdraft train --init-from first"])
    assert sentence in _trained(folder, {})


def test_a_card_names_commands_by_their_present_names_and_the_installation(folder):
    notes = ["Compared by `hsdraft overlap`."]
    card = _trained(folder, {"steps": "8"}, commands=["hsdraft average a b --out c", "hsdraft train"], notes=notes)
    assert "hsdraft make average a b" in card and "`hsdraft data overlap`" in card and "\nhsdraft train\n" in card
    assert "pip install ." in card


def test_a_card_says_how_much_of_the_speed_is_not_drafting(folder):
    row = {**ROW, "tau": 1.3, "speed_up": 1.72}
    enter_benchmarks(folder, [report(folder, summary={"plain": {**ROW, "tau": 1.0}, "tree": row})])
    card = render_card(folder, "org/drafter")
    assert "`tree` at most 1.30 of 1.72" in card and "packed weights" in card
