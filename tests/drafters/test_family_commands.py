"""Names and commands of drafters of all families: each takes a drafter of any format."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from conftest import as_plain, edited, make_drafter, make_target
from family_helpers import make_block_drafter, make_eagle
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CachebackDrafter, CausalLMDrafter, attach
from hf_hsdraft.cli._describe import cached_drafters
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint
from hf_hsdraft.methods.published.formats import formats

COMMANDED = ("block", "eagle", "language model", "cacheback")
commanded = pytest.mark.parametrize("kind", COMMANDED)


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target, tokenizer):
    """Folders of the target and of a drafter of each kind."""
    kinds = "target", "hidden states", *COMMANDED
    made = {name: tmp_path_factory.mktemp("folders") / name.replace(" ", "-") for name in kinds}
    target.save_pretrained(made["target"])
    tokenizer.save_pretrained(made["target"])
    make_block_drafter(target, block_size=4, target_name="org/big").save_pretrained(made["block"])
    make_eagle(target).save_pretrained(made["eagle"])
    make_drafter(target).save_pretrained(made["hidden states"])
    CachebackDrafter(node_cost=0.0, depth_cost=0.0).save_pretrained(made["cacheback"])
    CausalLMDrafter(make_target(seed=1), tokenizer).save_pretrained(made["language model"])
    return {name: str(folder) for name, folder in made.items()}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exception is None, result.exception
    return " ".join(result.output.split())


def refused(*arguments: str) -> str:
    return str(CliRunner().invoke(app, list(arguments)).exception)


def test_info_says_what_a_drafter_of_any_format_is(folders, target, tmp_path):
    for kind, told in {
        "block": ("speculators dspark", "block_size: 4", "MB", "aux_hidden_state_layer_ids: ["),
        "eagle": ("speculators eagle3", "target_hidden_size: 32"),
        "language model": ("causal language model", "reads: the text alone", "vocab_size: 97", "assistant_tokens: 5"),
    }.items():
        said = run("info", folders[kind])
        assert f"format: {told[0]}" in said and all(part in said for part in told), kind
        checkpoint = AnyCheckpoint.open(folders[kind])
        form = next(form for form in formats() if form.matches(checkpoint))
        assert all(text.isprintable() for each in form.describe(checkpoint).items() for text in each)
    said = run("info", folders["cacheback"])
    assert "family: cacheback, CachebackDrafter" in said and "ngram_length: 4" in said
    target.base_model.save_pretrained(tmp_path)
    error = refused("info", str(tmp_path))
    assert "is no drafter of a known format" in error
    assert all((form.name in error) == form.loads for form in formats())


def test_info_says_whether_a_target_fits_drafters_that_read_tokens(folders, tokenizer, tmp_path):
    for kind, name in {"language model": "CausalLMDrafter", "cacheback": "CachebackDrafter"}.items():
        said = run("info", folders[kind], "--target", folders["target"])
        assert f"{folders['target']} fits: it has all that this {name} needs" in said
    make_target().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    written = tmp_path / "tokenizer.json"
    written.write_text(written.read_text().replace('"w7"', '"seven"'))
    assert "this drafter's tokenizer is not the target's" in refused(
        "info", folders["language model"], "--target", str(tmp_path)
    )


@commanded
def test_commands_decode_with_drafters_of_any_format(kind, folders, tmp_path):
    both = "--target", folders["target"], "--drafter", folders[kind]
    said = run("check", folders[kind], folders["target"], "--max-new-tokens", "8")
    if kind == "cacheback":  # which cannot be trained
        assert re.search(r"verdict: passed: 3 of 3 texts are those of plain decoding; tau [1-9]\.\d\d$", said)
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["w1 w2 w3"]}))
        sizes = "--batch-sizes", "1", "--calls", "1", "--max-new-tokens", "4"
        run("measure", "throughput", *sizes, "--prompts", str(tmp_path / "prompts.jsonl"), *both)
    else:
        assert "right in training right in decoding" in said
        assert re.search(
            r"verdict: passed: training and decoding agree about [1-9]\d* predictions at all \d depths$", said
        )
    said = run("bench", "--variants", "default,tree24x6", "--max-new-tokens", "4", "--limit", "1", *both)
    assert "no --prompts given: 6 prompts" in said
    said = run("demo", "w1 w2 w3", "--max-new-tokens", "4", *both)
    assert "same text yes" in said and "\x1b" not in said


def test_several_drafters_of_different_kinds_are_compared(folders):
    names = [argument for kind in COMMANDED for argument in ("--drafter", folders[kind])]
    said = run("bench", "--variants", "tree24x6", "--max-new-tokens", "4", "--limit", "1", "--target",
               folders["target"], *names)  # fmt: skip
    assert "tree24x4" in said or ("tree24x3" in said and "tree24x6" in said)


@commanded
def test_a_name_and_an_attached_name_draft(kind, folders, target, prompt):
    drafted = as_plain(target, folders[kind], prompt, max_new_tokens=8)
    with attach(target, folders[kind]) as attachment:
        assert target.generate(prompt, max_new_tokens=8, do_sample=False).tolist() == drafted.sequences.tolist()
    assert attachment.statistics.calls == 1 and not attachment.statistics.stepped_aside


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_drafters_are_exported_as_others_read_them(kind, folders, tmp_path):
    out = tmp_path / "out"
    run("hub", "export", folders[kind], "--to", "speculators", "--out", str(out), "--target", "org/a-target")
    document = edited(out)
    assert document["speculators_model_type"] == {"block": "dspark", "eagle": "eagle3"}[kind]
    assert document["speculators_config"]["verifier"]["name_or_path"] == "org/a-target"
    assert "org/a-target" in (out / "README.md").read_text()
    before, after = (AutoDrafter.from_pretrained(folder) for folder in (folders[kind], out))
    assert after.config.target_name == "org/a-target"
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])
    with pytest.raises(ValueError, match=r"cannot be written in the format 'other': expected speculators;"):
        after.export("other", tmp_path / "again")
    assert CliRunner().invoke(app, ["hub", "export", folders[kind], "--out", str(out)]).exit_code == 2


@pytest.mark.parametrize("kind", ["cacheback", "hidden states", "language model"])
def test_what_no_other_format_holds_is_not_exported(kind, folders, tmp_path):
    error = refused("hub", "export", folders[kind], "--to", "speculators", "--out", str(tmp_path / "out"))
    assert "cannot be written in the format 'speculators': it has no format but its own" in error
    assert not (tmp_path / "out").exists()


def test_commands_for_hidden_states_say_so(folders):
    error = refused("hub", "card", folders["cacheback"])
    assert "needs a hidden-state drafter" in error and "is a CachebackDrafter" in error


def test_a_check_ends_with_its_verdict(folders, monkeypatch, tmp_path):
    def checked(*arguments: str):
        return CliRunner().invoke(app, ["check", folders["cacheback"], *arguments])

    monkeypatch.setattr("hf_hsdraft.runtime.misreading.first_divergence", lambda *_, **__: "differs at token 3")
    result = checked(folders["target"], "--max-new-tokens", "8")
    assert result.exit_code == 1
    assert "verdict: FAILED: 0 of 3 texts are those of plain decoding; tau " in result.output.splitlines()[-1]
    result = checked(folders["target"], "--max-new-tokens", "8", "--dtype", "bfloat16")
    assert result.exception is None and " ".join(result.output.split()).endswith("check with --dtype float32")
    result = CliRunner().invoke(
        app, ["check", folders["block"], folders["target"], "--max-new-tokens", "8", "--tolerance", "1e-12"]
    )
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("verdict: FAILED: training and decoding disagree at depth 1")
    (tmp_path / "none.jsonl").write_text("")
    # Before anything is loaded, and no verdict about nothing.
    assert "no prompts:" in checked("missing", "--prompts", str(tmp_path / "none.jsonl")).output


@pytest.mark.parametrize("command", ["demo", "check", "bench", "make plan"])
def test_a_prompt_beyond_the_window_is_refused_before_anything_is_decoded(command, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("the target ran"))
    long = " ".join(["w1"] * 300)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": [long]}))
    prompts = [long] if command == "demo" else ["--prompts", str(tmp_path / "prompts.jsonl")]
    drafter, model = folders["cacheback"], folders["target"]
    pair = [drafter, model] if command == "check" else ["--drafter", drafter, "--target", model]
    result = CliRunner().invoke(app, [*command.split(), *prompts, *pair])
    assert "model's context window is 256: shorten it" in f"{result.exception} {' '.join(result.output.split())}"


def test_the_cache_lists_drafters_of_every_format(folders, tmp_path):
    for name in ("target", "block", "eagle", "language model", "hidden states"):  # the target is no drafter
        place = tmp_path / "cache" / f"models--user--{name.split()[0]}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("c" * 40)
        shutil.copytree(folders[name], place / "snapshots" / ("c" * 40))
    found = cached_drafters(str(tmp_path / "cache"))
    assert {each.name: (each.format, each.target) for each in found} == {
        "user/block": ("speculators dspark", "org/big"),
        "user/eagle": ("speculators eagle3", ""),
        "user/language": ("causal language model", ""),
        "user/hidden": ("2", ""),
    }
    assert all(each.bytes and not each.problem for each in found)


def test_decoding_is_estimated_for_the_drafters_own_target_with_its_own_sizes(folders, tmp_path):
    make_target(hidden_size=96).save_pretrained(tmp_path)
    drafted = "--tau", "2", "--drafter", folders["block"]
    assert "41 rows" in run("estimate", "decoding", folders["target"], *drafted)
    assert "hidden_size=96" in refused("estimate", "decoding", str(tmp_path), *drafted)
    assert CliRunner().invoke(app, ["estimate", "training", folders["target"], "--family", "block"]).exit_code == 2
