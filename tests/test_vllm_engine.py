"""`hsdraft serve --engine vllm`: the command that starts vLLM's server. vLLM itself is not installed here."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import make_drafter, make_target
from typer.testing import CliRunner

from hf_hsdraft.cli import app
from hf_hsdraft.serving.vllm_engine import check_environment, server_command
from hf_hsdraft.vllm_plugin.speculation import NGRAMS, speculation_of


def written(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def speculators(folder, algorithm, tokens):
    proposals = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    return written(
        folder,
        speculators_model_type=algorithm,
        speculators_config={"algorithm": algorithm, "proposal_methods": proposals},
    )


@pytest.fixture
def drafter(tmp_path):
    saved = make_drafter(make_target(), target_tap_layers=[1, 2], num_draft_steps=4)
    saved.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_hidden_state_drafter_is_drafted_by_the_plugin(drafter):
    expected = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 4}
    assert speculation_of(drafter) == expected
    assert speculation_of(drafter, 2) == {**expected, "num_speculative_tokens": 2}


@pytest.mark.parametrize("wanted", [0, 5])
def test_chains_that_the_drafter_does_not_draft_are_refused(drafter, wanted):
    with pytest.raises(ValueError, match="expected 1 to 4"):
        speculation_of(drafter, wanted)


def test_formats_of_speculators_are_drafted_by_vllm_itself(tmp_path):
    found = speculation_of(speculators(tmp_path / "eagle", "eagle3", 7), on_cpu=True)
    assert (found["method"], found["num_speculative_tokens"]) == ("eagle3", 7)
    block = speculators(tmp_path / "block", "dspark", 8)
    assert speculation_of(block)["method"] == "dspark"
    with pytest.raises(ValueError, match="refuses it on CPUs"):
        speculation_of(block, on_cpu=True)


@pytest.mark.parametrize(
    "fields",
    [None, {"proposal_methods": {"speculative_tokens": 7}}, {"proposal_methods": ["greedy"]}, {"proposal_methods": 3}],
)
def test_damaged_fields_of_speculators_are_named(tmp_path, fields):
    saved = written(tmp_path / "eagle", speculators_model_type="eagle3", speculators_config=fields, block_size=5)
    if fields is None:  # says nothing
        assert speculation_of(saved)["num_speculative_tokens"] == 5
    else:
        with pytest.raises(ValueError, match="proposal_methods"):
            speculation_of(saved)


def test_ngrams_need_no_drafter():
    assert speculation_of(NGRAMS, 5)["model"].endswith("NgramProposer")


def test_what_vllm_does_not_draft_with_is_refused_before_it_starts(tmp_path):
    with pytest.raises(ValueError, match=r"specformer.*`hsdraft export`"):
        speculation_of(written(tmp_path / "slots", model_type="specformer"))
    selector = make_drafter(make_target(), target_tap_layers=[1, 2], injector="selector")
    selector.save_pretrained(tmp_path / "selector")
    with pytest.raises(ValueError, match="a selector as injector"):
        speculation_of(tmp_path / "selector")


def command(target, further=(), on_cpu=True, speculation=None):
    return server_command(
        "vllm/bin/python", str(target), speculation, served_name="user/target", dtype="float32", host="localhost",
        port=8000, on_cpu=on_cpu, further=further,
    )  # fmt: skip


def test_the_command_has_what_a_cpu_needs(tmp_path):
    make_target(max_position_embeddings=4096).config.save_pretrained(tmp_path)
    found = command(tmp_path, speculation={"method": "eagle3"})
    assert found[found.index("--max-num-batched-tokens") + 1] == "4096"  # a prompt is read in one piece
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(found)
    assert json.loads(found[found.index("--speculative-config") + 1]) == {"method": "eagle3"}
    shorter = command(tmp_path, ["--max-model-len", "512"])
    assert shorter[shorter.index("--max-num-batched-tokens") + 1] == "512"
    assert shorter[-2:] == ["--max-model-len", "512"]
    assert "--speculative-config" not in shorter
    own = command(tmp_path, ["--max-num-batched-tokens=9000"])
    assert "--max-num-batched-tokens" not in own and own[-1] == "--max-num-batched-tokens=9000"
    assert "--enforce-eager" not in command(tmp_path, on_cpu=False)
    underscored = command(tmp_path, ["--max_num_batched_tokens", "9000"])
    assert "--max-num-batched-tokens" not in underscored


@pytest.mark.parametrize(
    ("further", "window"),
    [
        (["--max-model-len", "8k"], "4096"),
        (["--max-model-len=auto"], "4096"),
        (["--max-model-len", "-1"], "4096"),
        (["--max_model_len", "512"], "512"),
        (["--max_model_len=512"], "512"),
    ],
)
def test_lengths_of_all_forms_are_left_to_vllm(tmp_path, further, window):
    make_target(max_position_embeddings=4096).config.save_pretrained(tmp_path)
    found = command(tmp_path, further)
    assert found[found.index("--max-num-batched-tokens") + 1] == window and found[-len(further) :] == further


def test_an_environment_without_vllm_is_named_with_what_to_do():
    with pytest.raises(ImportError, match=r"does not find vLLM.*python3 -m venv"):
        check_environment(sys.executable)
    with pytest.raises(ImportError, match="cannot be started"):
        check_environment("no/such/python")


def test_the_command_becomes_vllms_server(drafter, tmp_path, monkeypatch):
    make_target().config.save_pretrained(tmp_path / "target")
    started = []
    monkeypatch.setattr("hf_hsdraft.serving.vllm_engine._FOUND", "pass")
    monkeypatch.setattr("os.execvp", lambda file, command: started.append((file, command)) or sys.exit(0))
    options = ["--target", str(tmp_path / "target"), "--drafter", str(drafter), "--vllm-python", sys.executable]
    result = CliRunner().invoke(app, ["serve", "--engine", "vllm", *options, "--", "--max-model-len", "64"])
    assert result.exit_code == 0, result.output
    ((file, command),) = started
    assert file == command[0] == sys.executable
    assert json.loads(command[command.index("--speculative-config") + 1])["model"] == str(drafter)
    assert command[-2:] == ["--max-model-len", "64"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "vllm"], "an environment of its own"),
        (["--engine", "vllm", "--verification", "fly"], "verifies by its own rule"),
        (["--engine", "vllm", "--plain", "--drafter", NGRAMS], "leave one of the two out"),
        (["--", "--max-model-len", "512"], "only --engine vllm"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(options, said):
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0
    assert said in " ".join(f"{result.output} {result.exception}".replace("│", " ").split())
