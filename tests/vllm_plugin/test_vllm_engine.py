"""`hsdraft serve --engine vllm`: the command that starts vLLM's server. vLLM itself is not installed here."""

from __future__ import annotations

import json
import shlex
import shutil
import sys

import pytest
from conftest import make_drafter, make_target
from typer.testing import CliRunner

from hf_hsdraft.cli.main import app
from hf_hsdraft.vllm_plugin.speculation import NGRAMS, speculation_of
from hf_hsdraft.vllm_plugin.vllm_server import check_environment, server_command


def written(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def speculators(folder, algorithm, tokens, **fields):
    proposals = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").touch()
    return written(
        folder,
        speculators_model_type=algorithm,
        speculators_config={"algorithm": algorithm, "proposal_methods": proposals},
        **fields,
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
    for wanted in (0, 5):
        with pytest.raises(ValueError, match="expected 1 to 4"):
            speculation_of(drafter, wanted)


@pytest.mark.parametrize(
    ("kind", "layers", "fields", "refused"),  # `SpeculatorsConfig.build_vllm_speculative_config` of vLLM 0.32
    [
        ("eagle3", None, {"method": "eagle3"}, False),
        ("peagle", None, {"method": "eagle3", "parallel_drafting": True}, False),
        ("dspark", None, {"method": "dspark"}, True),
        ("dflash2", None, {"method": "dflash"}, True),
        ("dflash", None, {"method": "dflash"}, False),
        ("dflash", ["full_attention"] * 2, {"method": "dflash"}, False),
        ("dflash", ["sliding_attention"] * 2, {"method": "dflash"}, False),
        ("dflash", ["sliding_attention", "full_attention"], {"method": "dflash"}, True),
    ],
)
def test_formats_of_speculators_are_drafted_by_vllm_itself(tmp_path, kind, layers, fields, refused):
    """But for what its runner for CPUs refuses."""
    saved = speculators(tmp_path / "drafter", kind, 7, transformer_layer_config={"layer_types": layers})
    assert speculation_of(saved) == {**fields, "model": str(saved), "num_speculative_tokens": 7}
    if refused:
        with pytest.raises(ValueError, match=r"refuses it on CPUs.*--device cuda"):
            speculation_of(saved, on_cpu=True)
    else:
        assert speculation_of(saved, on_cpu=True) == speculation_of(saved)


def test_heads_that_vllm_does_not_read_are_refused(tmp_path):
    assert speculation_of(speculators(tmp_path / "one", "dspark", 7, markov_head_type="vanilla"))["method"] == "dspark"
    with pytest.raises(ValueError, match=r"markov_head_type=gated.*'vanilla' only"):
        speculation_of(speculators(tmp_path / "other", "dspark", 7, markov_head_type="gated"))


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
    assert speculation_of(NGRAMS)["model"].endswith("NgramProposer")
    assert [speculation_of(NGRAMS, wanted)["num_speculative_tokens"] for wanted in (None, 1, 24)] == [5, 1, 24]
    with pytest.raises(ValueError, match="expected 1 to 24"):
        speculation_of(NGRAMS, 25)


def test_what_vllm_does_not_draft_with_is_refused_before_it_starts(tmp_path):
    with pytest.raises(ValueError, match=r"specformer.*`hsdraft hub export`"):
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
    assert found[found.index("--gpu-memory-utilization") + 1] == "0.5"  # 92% is seldom free
    assert found[found.index("--max-num-batched-tokens") + 1] == "4096"  # a prompt is read in one piece
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(found)
    assert json.loads(found[found.index("--speculative-config") + 1]) == {"method": "eagle3"}
    roomy = command(tmp_path, ["--gpu-memory-utilization", "0.9"])
    assert roomy.count("--gpu-memory-utilization") == 1 and roomy[-1] == "0.9"
    own = command(tmp_path, ["--max-num-batched-tokens=9000"])
    assert "--max-num-batched-tokens" not in own and own[-1] == "--max-num-batched-tokens=9000"
    assert not {"--enforce-eager", "--speculative-config"} & set(command(tmp_path, on_cpu=False))
    underscored = command(tmp_path, ["--max_num_batched_tokens", "9000"])
    assert "--max-num-batched-tokens" not in underscored


@pytest.mark.parametrize(
    ("further", "window"),
    [
        (["--max-model-len", "8k"], "4096"),
        (["--max-model-len=auto"], "4096"),
        (["--max-model-len", "512"], "512"),
        (["--max-model-len", "-1"], "4096"),
        (["--max_model_len", "512"], "512"),
        (["--max_model_len=512"], "512"),
        (["--max-model-len", "512", "--max-model-len=256"], "256"),
    ],
)
def test_lengths_of_all_forms_are_left_to_vllm(tmp_path, further, window):
    make_target(max_position_embeddings=4096).config.save_pretrained(tmp_path)
    found = command(tmp_path, further)
    assert found[found.index("--max-num-batched-tokens") + 1] == window and found[-len(further) :] == further


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A function that makes an interpreter which finds a module `vllm`, and one that it also finds a plugin."""
    monkeypatch.chdir(tmp_path)

    def make(vllm=True, plugin=False):
        packages = tmp_path / "packages"
        packages.mkdir(exist_ok=True)
        if vllm:
            (packages / "vllm.py").touch()
        if plugin:
            install_plugin(packages)
        python = tmp_path / "python"
        search = shlex.quote(str(packages))
        python.write_text(f'#!/bin/sh\nPYTHONPATH={search} exec {shlex.quote(sys.executable)} -S "$@"\n')
        python.chmod(0o755)
        return str(python)

    return make


def install_plugin(folder):
    """What `pip install hf-hsdraft` leaves in a folder of packages, as far as entry points go."""
    installed = folder / "hf_hsdraft-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hf_hsdraft\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\nhsdraft = hf_hsdraft.x:register\n")


def test_an_environment_without_vllm_is_named_with_what_to_do(environment):
    for python, told in (
        (environment(vllm=False), r"does not find vLLM.*python3 -m venv"),
        ("no/such/python", "cannot be started"),
        (shutil.which("true"), "true is no Python interpreter"),
    ):
        with pytest.raises(ImportError, match=told):
            check_environment(python, with_plugin=False)


def test_the_plugin_has_to_be_installed_where_it_drafts(environment, tmp_path):
    python = environment()
    install_plugin(tmp_path)  # the current folder, as a checkout; nothing is installed by that
    check_environment(python, with_plugin=False)
    with pytest.raises(ImportError, match="hf_hsdraft is not installed"):
        check_environment(python, with_plugin=True)
    check_environment(environment(plugin=True), with_plugin=True)


@pytest.fixture
def serve(environment, tmp_path, monkeypatch):
    """A function that runs the command with a target, and returns the command that it becomes, or what it says."""
    make_target().config.save_pretrained(tmp_path / "target")

    def run(*options, **installed):
        started = []
        monkeypatch.setattr("os.execvp", lambda file, command: started.append(command) or sys.exit(0))
        own = ["--target", str(tmp_path / "target"), "--vllm-python", environment(**installed)]
        result = CliRunner().invoke(app, ["serve", "--engine", "vllm", *own, *options])
        assert bool(started) == (result.exit_code == 0), result.output
        return started[0] if started else said_by(result)

    return run


def said_by(result):
    return " ".join(f"{result.output} {result.exception}".replace("│", " ").split())


def option(command, name):
    return command[command.index(name) + 1]


def test_the_command_becomes_vllms_server(serve, drafter, tmp_path):
    command = serve("--drafter", str(drafter), "--", "--max-model-len", "64", plugin=True)
    assert command[0] == str(tmp_path / "python")
    told = json.loads(option(command, "--speculative-config"))
    assert (told["model"], told["num_speculative_tokens"]) == (str(drafter), 4)
    assert command[-2:] == ["--max-model-len", "64"] and "--enforce-eager" in command
    command = serve("--drafter", NGRAMS, "--num-speculative-tokens", "7", "--device", "cuda")
    assert json.loads(option(command, "--speculative-config"))["num_speculative_tokens"] == 7
    assert "--enforce-eager" not in command


def test_only_drafters_of_the_plugin_need_it(serve, tmp_path):
    eagle = speculators(tmp_path / "eagle", "eagle3", 7)
    assert "--speculative-config" in serve("--drafter", str(eagle))
    assert "--speculative-config" not in serve("--plain")


@pytest.mark.parametrize(
    ("name", "plugin", "said"),
    [
        ("whole", False, "hf_hsdraft is not installed"),
        (NGRAMS, False, "hf_hsdraft is not installed"),
        ("without weights", True, "has no model.safetensors"),
        ("", False, "the name is empty"),
    ],
)
def test_what_is_missing_is_said_before_vllm_starts(serve, drafter, name, plugin, said):
    if name == "without weights":
        (drafter / "model.safetensors").unlink()
    assert said in serve("--drafter", name if name in ("", NGRAMS) else str(drafter), plugin=plugin)


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_hidden_state_drafters_of_other_targets_are_refused(serve, tmp_path, size):
    own = make_target()
    other = make_target(**{size: 2 * getattr(own.config, size)})
    make_drafter(other, target_tap_layers=[1, 2]).save_pretrained(tmp_path / "other")
    said = serve("--drafter", str(tmp_path / "other"), plugin=True)
    found = getattr(own.config, size)
    assert f"has {size}={found}, the drafter expects {2 * found}" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"transformer_layer_config": {"vocab_size": 5, "hidden_size": 32}}, "drafter expects 5"),
        ({"transformer_layer_config": {"vocab_size": 97, "hidden_size": 6}}, "drafter expects 6"),
        ({"transformer_layer_config": {"hidden_size": 32}, "target_hidden_size": 7}, "drafter expects 7"),
    ],
)
def test_drafters_in_the_format_of_speculators_too(serve, tmp_path, fields, said):
    assert said in serve("--drafter", str(speculators(tmp_path / "eagle", "eagle3", 7, **fields)))


@pytest.mark.parametrize(
    "options", [["-tp", "2"], ["--tensor-parallel-size=2"], ["--tensor_parallel_size", "4"], ["-pp=2"]]
)
def test_a_hidden_state_drafter_needs_the_target_on_one_device(serve, drafter, options):
    said = serve("--drafter", str(drafter), "--", *options, plugin=True)
    assert "does not go with a hidden-state drafter" in said


@pytest.mark.parametrize(("name", "size"), [(NGRAMS, "2"), ("drafter", "1")])
def test_others_share_the_target_over_devices_and_one_may_be_named(serve, drafter, name, size):
    command = serve("--drafter", NGRAMS if name == NGRAMS else str(drafter), "--", "-tp", size, plugin=True)
    assert command[-2:] == ["-tp", size]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "vllm", "--drafter", NGRAMS], "a separate environment"),
        (["--engine", "vllm", "--verification", "fly"], "verifies by its own rule"),
        (["--engine", "vllm", "--plain", "--drafter", NGRAMS], "leave one of the two out"),
        (["--engine", "vllm", "--plain", "--num-speculative-tokens", "3"], "leave one of the two out"),
        (["--engine", "vllm", "--drafter", NGRAMS, "--device", "cuda:1"], "expected cpu or cuda"),
        (["--engine", "vllm", "--drafter", NGRAMS, "--device", "mps"], "expected cpu or cuda"),
        (["--num-speculative-tokens", "3"], "only --engine vllm"),
        (["--", "--max-model-len", "512"], "only --engine vllm"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(options, said):
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0
    assert said in said_by(result)
