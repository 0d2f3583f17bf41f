"""Methods are loaded by their names, and the core does without them."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from conftest import make_target
from test_self_speculation import make_self
from test_specformer import make_specformer

import hf_hsdraft
from hf_hsdraft.core import methods
from hf_hsdraft.core.draft_tree import TREE_BUILDERS
from hf_hsdraft.core.methods import Registry
from hf_hsdraft.drafters.base.draft_options import METHOD_OPTIONS as OF_DRAFTS
from hf_hsdraft.drafters.base.registry import FAMILIES
from hf_hsdraft.methods.published.formats import formats
from hf_hsdraft.training.families.family import GROWTHS
from hf_hsdraft.training.families.trainable import TRAINABLE
from hf_hsdraft.training.loop.arguments import DRAFTER_OPTIONS, TRAINING_OPTIONS
from hf_hsdraft.training.loss.chains import DATA_POLICIES
from hf_hsdraft.training.loss.loss import WEIGHTINGS
from hf_hsdraft.training.loss.objectives import OBJECTIVES, WHOLE_LOSSES
from hf_hsdraft.verify.registry import VERIFIERS, rule_options


@pytest.fixture
def two_rules(monkeypatch):
    monkeypatch.setattr(methods, "_index", lambda: {"rule": {"late": "late.rule"}})
    registry = Registry("rule", {"early": 1})

    def load(name):
        assert name == "hf_hsdraft.methods.late.rule"
        registry["late"] = 2
        return types.ModuleType(name)

    monkeypatch.setattr(methods.importlib, "import_module", load)
    return registry


def test_an_offer_is_loaded_when_it_is_asked_for(two_rules):
    assert list(two_rules) == ["early", "late"] and len(two_rules) == 2 and "late" in two_rules
    assert two_rules.loaded == {"early": 1}
    assert two_rules["late"] == 2 and list(two_rules) == ["early", "late"]


def test_what_nobody_offers_is_a_key_error(two_rules):
    with pytest.raises(KeyError, match="never"):
        two_rules["never"]


def test_without_the_folder_nothing_is_offered(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_hsdraft.methods", None)
    methods._index.cache_clear()
    assert methods.offered("verification") == []
    methods._index.cache_clear()


def child(code: str, package: Path, *arguments: str) -> str:
    """What a process prints that finds the package in a folder, and the tests' helpers too."""
    paths = os.pathsep.join([str(package), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package)
    assert run.returncode == 0, run.stderr
    return run.stdout


WITHOUT = """
import json, sys
from pathlib import Path
# An editable installation would find the folder where it was.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
import pytest, torch
import hf_hsdraft
from conftest import make_drafter, make_target
from typer.testing import CliRunner
from hf_hsdraft import AutoDrafter, CachebackDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.training.families.trainable import trainable

assert Path(hf_hsdraft.__file__).is_relative_to(sys.argv[1])
target, ids = make_target(), torch.arange(5, 17)[None]
options = {"max_new_tokens": 16, "do_sample": False}
for drafter in (make_drafter(target), CachebackDrafter()):
    drafted = target.generate(ids, **options, assistant_model=drafter, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == target.generate(ids, **options).tolist()
    assert sum(drafted.statistics.drafted_nodes) > 0
listed = CliRunner().invoke(app, ["--help"]).output
assert "\\n  bench " in listed and "\\n  plan " not in listed
from hf_hsdraft import *

assert "CascadeDrafter" not in globals() and HSDrafter is type(make_drafter(target))
with pytest.raises(ImportError, match="CascadeDrafter is not here: it belongs to a method"):
    from hf_hsdraft import CascadeDrafter
(Path(sys.argv[1]) / "config.json").write_text(json.dumps({"model_type": "specformer"}))
with pytest.raises(ValueError, match="no drafter of a known format .model_type=specformer"):
    AutoDrafter.from_pretrained(sys.argv[1])
with pytest.raises(ValueError, match="family='self' is unknown: expected one of hidden-state"):
    trainable("self", {})
drafter = make_drafter(target)
drafter.save_pretrained(sys.argv[1] + "/saved")
path = Path(sys.argv[1]) / "saved" / "generation_config.json"
path.write_text(json.dumps({**json.loads(path.read_text()), "verification": "fly", "fly_window": 0}))
drafter = AutoDrafter.from_pretrained(path.parent)
assert target.generate(ids, **options, assistant_model=drafter).tolist() == target.generate(ids, **options).tolist()
drafter.generation_config.verification = "fly"
with pytest.raises(ValueError, match="verification='fly' is invalid: expected one of walk$"):
    target.generate(ids, **options, assistant_model=drafter)

from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.loop.start import drafter_to_start_from

drafter = inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear"), make_drafter(target), "code").eval()
assert target.generate(ids, **options, assistant_model=drafter).tolist() == target.generate(ids, **options).tolist()
drafter.generation_config.adapter_name = "code"
with pytest.raises(ValueError, match="adapter_name='code' is invalid: expected none, as .*adapters.py is not here"):
    target.generate(ids, **options, assistant_model=drafter)
with pytest.raises(ImportError, match="'mtp' .finder. belongs to a method"):
    target.generate(ids, **options, assistant_model="mtp")
assert "history" not in listed
plan = TrainingPlan(out="out", init_from="none", lora=2)
with pytest.raises(ImportError, match="'peft' .adapting. belongs to a method"):
    drafter_to_start_from(trainable("hidden-state", {}), target, None, plan)
weights = load_file(path.parent / "model.safetensors")
save_file({name: each.to(torch.float8_e4m3fn) for name, each in weights.items()}, path.parent / "model.safetensors")
with pytest.raises(ValueError, match="has dtype F8_E4M3: expected floating point"):
    AutoDrafter.from_pretrained(path.parent)
"""


@pytest.mark.process
def test_the_core_works_with_the_folder_away(tmp_path):
    source = Path(methods.__file__).parent.parent
    shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("methods", "__pycache__"))
    child(WITHOUT, tmp_path, str(tmp_path))


LATER = """
import sys
from hf_hsdraft import CachebackDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.core.draft_tree import TREE_BUILDERS
from transformers import AutoModel

def loaded():
    return [name.removeprefix("hf_hsdraft.methods.") for name in sys.modules if name.startswith("hf_hsdraft.methods.")]

drafter = CachebackDrafter()
assert DraftOptions.of(drafter).own == {} and not loaded()
drafter.generation_config.fly_window = 2
assert DraftOptions.of(drafter).own["fly_window"] == 2
assert sorted(loaded()) == ["lossy", "lossy.relaxed"]
assert TREE_BUILDERS["p_best"].whole
drafter.generation_config.verification = "typical"
assert "typical_delta" in DraftOptions.of(drafter).own
assert sorted(loaded())[2:] == ["refinement", "refinement.refinement"]
for folder in sys.argv[1:]:
    print(type(AutoModel.from_pretrained(folder)).__name__)
"""


@pytest.mark.process
def test_a_method_is_loaded_when_an_option_names_it_or_transformers_asks_for_it(tmp_path):
    """Without code from the folder: importing the package is enough, as it was before there were methods."""
    target = make_target()
    for name, drafter in (("slots", make_specformer(target)), ("layers", make_self(target))):
        drafter.save_pretrained(tmp_path / name)
    printed = child(LATER, Path(methods.__file__).parents[2], str(tmp_path / "slots"), str(tmp_path / "layers"))
    assert printed.split() == ["SpecFormerDrafter", "SelfDrafter"]


def test_help_is_told_without_loading_pytorch():
    code = """
import sys
sys.argv = ["/usr/bin/hsdraft", *sys.argv[1:]]
from hf_hsdraft.cli.main import app
app(standalone_mode=False)
print("loaded:", *({"torch", "transformers"} & sys.modules.keys()))
"""
    package = Path(methods.__file__).parents[2]
    for command in ("make plan", "train"):
        printed = child(code, package, *command.split(), "--help")
        assert f"hsdraft {command} [OPTIONS]" in printed and printed.endswith("loaded:\n")
    command = [sys.executable, "-X", "importtime", "-m", "hf_hsdraft.cli", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=package, check=True)
    assert "\n  make " in run.stdout and not re.search(r"\| +(torch|transformers)$", run.stderr, re.MULTILINE)


def test_all_that_is_offered_is_there():
    """Every module of the index loads, and registers what it offers."""
    for kind, names in methods._index().items():
        for name in names:
            module = methods.load(kind, name)
            if kind == "name":
                assert getattr(module, name).__name__ == name
    losses = (OBJECTIVES, WHOLE_LOSSES, WEIGHTINGS, DATA_POLICIES)
    training = (GROWTHS, TRAINABLE, TRAINING_OPTIONS, DRAFTER_OPTIONS)
    for registry in (VERIFIERS, TREE_BUILDERS, OF_DRAFTS, FAMILIES, *losses, *training):
        assert set(methods.offered(registry.kind)) <= registry.loaded.keys()
    assert set(methods.offered("format")) <= {form.name for form in formats()}
    assert set(methods.offered("verification_option")) == {option.name for option in rule_options()}
    assert {rule.file for rule in VERIFIERS.values()} - {""} <= set(methods.offered("file"))


def test_public_names_are_those_that_type_checkers_read():
    stub = ast.parse(Path(hf_hsdraft.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = {alias.name: line.module for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert set(found) == set(hf_hsdraft.__all__) <= set(dir(hf_hsdraft))
    assert hf_hsdraft._MODULES.items() <= found.items()
    assert set(methods.offered("name")) == hf_hsdraft._OF_METHODS
    for name in set(found) - {"__version__"}:
        module = importlib.import_module(f"hf_hsdraft.{found[name]}")
        assert getattr(hf_hsdraft, name) is getattr(module, name)
    with pytest.raises(AttributeError, match="no attribute 'NoDrafter'"):
        hf_hsdraft.NoDrafter  # noqa: B018
