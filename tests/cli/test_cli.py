"""The command `hsdraft`: which commands it has, and how further ones join it."""

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import unloadable
from packaging.requirements import Requirement
from typer.main import get_command
from typer.testing import CliRunner

import hf_hsdraft
from hf_hsdraft import cli as commands
from hf_hsdraft._version import __version__
from hf_hsdraft.cli import main as cli
from hf_hsdraft.transformers_version import NEEDED, TESTED

ROOT = Path(__file__).parents[2]

TOP = ["demo", "try", "train", "bench", "check", "serve", "chat", "ui", "info", "find", "env"]
GROUPS = {
    "estimate": ["training", "decoding", "hierarchy"],
    "hub": ["push", "pull", "list", "card", "export"],
    "measure": ["throughput", "quality", "lm-eval"],
    "data": ["coverage", "overlap"],
    "history": ["list", "erase"],
    "make": ["average", "prune", "refiner", "verifier", "skip-layers", "plan"],
    "remote": ["serve"],
}


def listed(*command: str) -> list[str]:
    """The lines of an overview, one a command."""
    shown = CliRunner().invoke(cli.app, [*command, "--help"], env={"COLUMNS": "80"}, terminal_width=80).output
    lines = shown.splitlines()
    lines = [line for line in lines[lines.index("Commands:") + 1 :] if line]
    assert all(len(line) <= 80 and "..." not in line and line[:2] == "  " != line[1:3] for line in lines)
    return [line.split()[0] for line in lines]


def test_commands_say_what_they_do_and_each_overview_has_a_line_for_each():
    assert listed() == [*TOP, *GROUPS]
    for group, names in GROUPS.items():
        assert listed(group) == names
    for command in [[name] for name in TOP] + [[group, name] for group in GROUPS for name in GROUPS[group]]:
        own = CliRunner().invoke(cli.app, [*command, "--help"])
        assert own.exit_code == 0 and f" {' '.join(command)} [OPTIONS]" in own.output


def test_the_help_of_training_shows_every_option_with_its_type_and_default():
    from dataclasses import fields

    from transformers import TrainingArguments

    from hf_hsdraft.training.data.plan import PANELS, DrafterFields, LearningOptions, TrainingPlan, options_of
    from hf_hsdraft.training.loop.arguments import DrafterTrainingArguments, parse_arguments

    learning = options_of(LearningOptions)
    own = {each.name for each in fields(DrafterTrainingArguments)} - {each.name for each in fields(TrainingArguments)}
    assert own - {"method_options"} <= learning.keys()
    assert {each.name for each in fields(TrainingPlan)} - {"drafter"} == options_of(TrainingPlan).keys()
    for name, each in learning.items():
        assert each.sentence.endswith(".")
        given = {bool: [], list[float] | None: ["1,0.5"], bool | None: ["true"], str: [each.default or "x"]}
        assert name in parse_arguments([f"--{name.replace('_', '-')}", *given.get(each.type, [str(each.default or 1)])])
    command = get_command(cli.app).commands["train"]
    shown = CliRunner().invoke(cli.app, ["train", "--help"]).output
    flags = [flag for each in command.params for flag in each.opts]
    assert {*options_of(TrainingPlan), *options_of(DrafterFields)} < {each.name for each in command.params}
    assert {"--out", "--opening", "--temperature", "--taps", "--markov-head", "--quick"} < {*flags}
    assert all(flag in shown for flag in [*flags, *(f"--{name.replace('_', '-')}" for name in learning), "--help"])
    assert "[default: 0.0006]" in shown and "[default: 256; x>=1]" in shown
    assert [line[:-1] for line in shown.splitlines() if line[:-1] in PANELS] == list(PANELS)


def test_the_version_is_printed():
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == __version__


def test_a_new_command_is_a_new_file(tmp_path, monkeypatch):
    (tmp_path / "greet.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef greet(name: str): print('Hello', name)\n"
    )
    (tmp_path / "_helpers.py").write_text("raise ImportError\n")
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    spec = importlib.util.spec_from_file_location("hf_hsdraft.cli.again", cli.__file__)
    extended = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extended)
    assert CliRunner().invoke(extended.app, ["greet", "world"]).output == "Hello world\n"
    assert "greet" not in CliRunner().invoke(cli.app, ["--help"]).output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-minutes", "0"], "max_minutes=0.0 is invalid"),
        (["--objective", "guess"], "objective='guess' is unknown"),
        (["--kinds", "gossip"], "gossip"),
        (["--kinds", "code", "--prompts", "chats.jsonl"], "--kinds is for invented prompts"),
        (["--kinds", "code", "--opening", "w1 "], "--kinds and --opening are two ways"),
        (["--objective", "ctc"], "ctc"),
        (["--prompts", "chats.jsonl"], "chats.jsonl holds no prompts"),
        (["--num-prompts", "24"], "24 conversations and prompts are too few: 48 of them are held out"),
        (["--prompts", "few.jsonl"], "3 conversations and prompts are too few: 48 of them"),
        (["--dataset", "user/chats", "--num-prompts", "24"], "24 conversations and prompts are too few"),
        (["--init-from", "./nothere"], "no such drafter folder: "),
        (["--answers-from", "http://localhost:1", "--invented-turns", "1"], "a server cannot invent turns"),
        (["--no-such-option", "3"], "--no-such-option"),
        (["--learning-rate", "high"], "learning"),
        (["--learning-rate=-1"], "expected 0 or more"),
        (["--gradient-accumulation-steps", "0"], "expected 1 or more"),
        (["--report-to", "wandb"], "wandb"),
        (["--lora", "4"], "--init-from"),
        (["--adapter-name", "code"], "names what LoRA trains: give --lora too"),
        (["--init-from", "any", "--lora", "4", "--adapter-name", "data"], "adapter_name='data' is invalid"),
        (["--init-from", "any", "--lora", "4", "--adapter-name", "a.b"], "adapter_name='a.b' is invalid"),
        (["--family", "block", "--init-from", "any", "--lora", "4"], "load no adapters"),
        (["--family", "eagle3", "--markov-rank", "8"], "whose drafters have no such field"),
    ],
)
def test_training_options_are_checked_before_a_target_is_loaded(tmp_path, options, said):
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "few.jsonl").write_text('{"turns": ["w1"]}\n' * 3)
    options = [str(tmp_path / part) if part.endswith(".jsonl") else part for part in options]
    arguments = ["train", "--target", str(unloadable(tmp_path / "target")), "--out", str(tmp_path / "out"), *options]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code != 0 and said in f"{outcome.output}{outcome.exception}"
    assert not (tmp_path / "out").exists()


def test_two_runs_in_one_folder_are_refused_before_a_target_is_loaded(tmp_path):
    from hf_hsdraft.training.loop.run_folder import only_run

    (tmp_path / "chats.jsonl").write_text('{"turns": ["w1"]}\n' * 60)
    target, prompts = unloadable(tmp_path / "target"), tmp_path / "chats.jsonl"
    arguments = ["train", "--target", str(target), "--out", str(tmp_path), "--prompts", str(prompts)]
    for _ in range(2):
        with only_run(tmp_path):
            outcome = CliRunner().invoke(cli.app, arguments)
            assert f"another run is at work in {tmp_path}: wait until it ends" in str(outcome.exception)
        outcome = CliRunner().invoke(cli.app, arguments)  # it begins to load
        assert outcome.exit_code and "another run" not in str(outcome.exception)


def test_an_old_transformers_is_named_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("hf_hsdraft.transformers_version.needs_newer", lambda: "transformers 5.1 is installed")
    monkeypatch.setattr("sys.argv", ["hsdraft", "find", str(unloadable(tmp_path / "target"))])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1 and "transformers 5.1 is installed" in capsys.readouterr().err


def test_a_transformers_beyond_the_tested_range_warns_once_at_import(monkeypatch, recwarn):
    monkeypatch.setattr("transformers.__version__", ".".join(map(str, TESTED)) + ".7")
    importlib.reload(hf_hsdraft)
    assert not recwarn.list
    version = f"{TESTED[0]}.{TESTED[1] + 1}.0"
    monkeypatch.setattr("transformers.__version__", version)
    importlib.reload(hf_hsdraft)
    assert [str(each.message).count(f"transformers {version} is installed") for each in recwarn.list] == [1]


IMPORT_WITH_OTHERS = """
import os, sys, transformers
from transformers.generation.utils import GenerationMixin
transformers.__version__ = sys.argv[1]
for change in sys.argv[2:]:
    print("BEGIN", flush=True)
    print("BEGIN", file=sys.stderr)
    if os.fork() == 0:
        exec(change)
        import hf_hsdraft
        print("imported", hasattr(GenerationMixin.init_continuous_batching, "_hsdraft_functions"))
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.process
def test_a_newer_transformers_is_refused_only_where_the_hooks_do_not_fit_it():
    changes = {
        "": None,
        "del GenerationMixin._assisted_decoding": "GenerationMixin has no _assisted_decoding",
        "GenerationMixin._validate_model_kwargs = lambda self, kwargs: None": (
            "GenerationMixin._validate_model_kwargs takes no model_kwargs"
        ),
        "from transformers.generation import logits_process; del logits_process.WhisperNoSpeechDetection": (
            "cannot import name 'WhisperNoSpeechDetection'"
        ),
    }
    version = f"{TESTED[0] + 1}.0.0"
    command = [sys.executable, "-c", IMPORT_WITH_OTHERS, version, *changes]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    outs, errors = (said.split("BEGIN\n")[1:] for said in (done.stdout, done.stderr))
    for why, out, error in zip(changes.values(), outs, errors, strict=True):
        told = error.strip().splitlines()
        if why is None:
            assert out == "imported True\n0\n"
            assert told[0].startswith("<string>:10: UserWarning: transformers"), "the line that imports is named"
        else:
            assert out == "1\n" and told[-1].startswith("ImportError: transformers") and why in told[-1]
        assert f"transformers {version} is installed" in error
        assert f"Install 'transformers<{TESTED[0]}.{TESTED[1] + 1}'" in error


def test_the_tested_range_is_that_of_the_package_and_of_ci():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [needed] = [Requirement(each) for each in project["dependencies"] if each.startswith("transformers")]
    assert str(needed.specifier) == f">={NEEDED[0]}.{NEEDED[1]}", "a newer one is not refused by pip"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"transformers=={TESTED[0]}.{TESTED[1]}." in constraints
    assert f"transformers=={NEEDED[0]}.{NEEDED[1]}." in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(("device", "said"), [("cuda:99", "cuda:99 is not here"), ("gpu", "'gpu' is no device")])
def test_a_device_that_is_not_here_is_told_before_anything_is_loaded(device, said):
    commands = {(name,): command for name, command in get_command(cli.app).commands.items()}
    commands |= {
        (*group, name): each
        for group in list(commands)
        for name, each in getattr(commands[group], "commands", {}).items()
    }
    takers = [path for path, each in commands.items() if any("--device" in parameter.opts for parameter in each.params)]
    assert {("demo",), ("train",), ("serve",), ("remote", "serve")} <= set(takers)
    for path in takers:
        outcome = CliRunner().invoke(cli.app, [*path, "--device", device])
        assert outcome.exit_code == 2 and said in outcome.output, path


@pytest.mark.parametrize("given", ["", " , ", "1,x"])
def test_a_list_without_numbers_is_refused_before_anything_is_loaded(given):
    outcome = CliRunner().invoke(cli.app, ["make", "prune", "--out", "small", "--layers", given])
    assert outcome.exit_code == 2 and f"expected numbers such as 0,1,15, found {given!r}" in outcome.output


def test_train_names_its_extra_before_it_loads_anything(monkeypatch, tmp_path):
    from hf_hsdraft.cli import _shared

    monkeypatch.setattr(_shared, "find_spec", lambda name: None if name == "pyarrow" else name)
    found = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "out")])
    assert isinstance(found.exception, ImportError) and not (tmp_path / "out").exists()
    assert "pyarrow" in str(found.exception) and ".[train]" in str(found.exception)
