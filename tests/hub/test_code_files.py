"""The code that travels with a drafter: which files, and how they are flattened."""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import make_drafter, make_target
from test_self_speculation import make_self
from test_specformer import make_specformer
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports

import hf_hsdraft
from hf_hsdraft import HSDraftConfig, HSDrafter
from hf_hsdraft.hub.code_files import write_code, write_flat

PACKAGE = Path(hf_hsdraft.__file__).parent
# Files that a careful person reads before trusting them.
MOST_FILES, MOST_LINES = 12, 2000


@pytest.mark.parametrize("make", [make_drafter, make_specformer, make_self], ids=["states", "slots", "first layers"])
def test_what_travels_can_be_read_before_it_is_trusted(make, tmp_path):
    """It asks for transformers, torch and the Hub's client alone; the package is handed over to where it is there."""
    make(make_target()).save_pretrained(tmp_path)
    files = sorted(tmp_path.rglob("*.py"))
    assert len(files) <= MOST_FILES and sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES
    for path in files:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        assert ("hf_hsdraft" in names) == (path.name == "hub_entry.py")
        own = {"torch", "transformers", "huggingface_hub", "accelerate", "hf_hsdraft"} | sys.stdlib_module_names
        assert {name.partition(".")[0] for name in names} <= own
    assert set(get_imports(tmp_path / "custom_generate" / "hub_entry.py")) <= {
        "__future__",
        "transformers",
    }  # transformers demands these of the entry


def test_the_package_runs_the_network_that_travels(tmp_path):
    """No copy of it: each file that travels is a file of the package, but for its relative imports and the entry."""
    assert write_code(HSDrafter, tmp_path) == "hub_entry"
    for path in tmp_path.glob("*.py"):
        if path.name != "hub_entry.py":
            sent = path.read_text().splitlines()
            whole = [path.read_text().splitlines() for path in PACKAGE.rglob(path.name)]
            assert any(_without_imports(sent) == _without_imports(lines) for lines in whole)


def _without_imports(lines: list[str]) -> list[str]:
    return [line for line in lines if "import" not in line]


def package(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_imports_of_any_depth_and_form_are_rewritten(tmp_path):
    package(
        tmp_path,
        entry="from .room.first import (\n    a,\n    b as c,\n)\n",
        room__first="def later():\n    from ..second import x  # from ..nowhere import y\n    return x\na = b = 1\n",
        second="x = 'from .room.first import a'\n",
    )
    flat = tmp_path / "flat"
    flat.mkdir()
    assert write_flat([tmp_path / "entry.py"], flat) == ["entry.py", "first.py", "second.py"]
    assert (flat / "entry.py").read_text() == "from .first import (\n    a,\n    b as c,\n)\n"
    assert "    from .second import x  # from ..nowhere import y\n" in (flat / "first.py").read_text()
    assert (flat / "second.py").read_text() == (tmp_path / "second.py").read_text()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"entry": "from . import other\n", "other": ""}, "entry.py, line 1: expected `from .file import name`"),
        ({"entry": "from .room import first\n", "room__first": ""}, "entry.py, line 1"),
        (
            {"entry": "from .one.same import a\nfrom .two.same import a\n", "one__same": "", "two__same": ""},
            "several same.py",
        ),
    ],
    ids=["a module of a package", "a folder", "one name twice"],
)
def test_code_that_could_not_travel_is_told(tmp_path, files, told):
    with pytest.raises(ImportError, match=told.replace("(", r"\(")):
        write_flat([package(tmp_path, **files) / "entry.py"], tmp_path)


def test_a_saved_drafter_names_entry_and_code(tmp_path):
    drafter = make_drafter(make_target())
    drafter.register_for_auto_class()
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "custom_generate/hub_entry.HSDraftConfig",
        "AutoModel": "custom_generate/hub_entry.HSDrafter",
    }
    place = tmp_path / "custom_generate"
    assert sorted([*config["code_files"], "generate.py"]) == sorted(path.name for path in place.glob("*.py"))
    assert not list(tmp_path.glob("*.py"))
    drafter.register_for_auto_class(AutoModel)  # as transformers does for code of a repository
    HSDraftConfig.register_for_auto_class()
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == config["auto_map"]
    with pytest.raises(ValueError, match="auto_class='AutoModelForCausalLM' is invalid"):
        drafter.register_for_auto_class("AutoModelForCausalLM")


def test_a_class_that_somebody_derived_brings_its_code_once_it_is_registered(tmp_path, monkeypatch):
    (tmp_path / "own_drafter.py").write_text(
        "from hf_hsdraft import HSDrafter\n\n\nclass OwnDrafter(HSDrafter):\n    mine = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_drafter").OwnDrafter
    drafter = own(make_drafter(make_target()).config)
    drafter.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "custom_generate" / "own_drafter.py").exists()
    assert type(HSDrafter.from_pretrained(tmp_path / "plain")) is HSDrafter
    own.register_for_auto_class()
    drafter.save_pretrained(tmp_path / "registered")
    config = json.loads((tmp_path / "registered" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "custom_generate/own_drafter.OwnDrafter"
    assert {"own_drafter.py", "hub_entry.py"} <= set(config["code_files"])
    # As `AutoModel` does where the package was not imported before; else it takes what the package registered.
    remote = get_class_from_dynamic_module(config["auto_map"]["AutoModel"], tmp_path / "registered")
    remote.register_for_auto_class(AutoModel)
    loaded = remote.from_pretrained(tmp_path / "registered")
    assert loaded.mine and isinstance(loaded, HSDrafter) and not isinstance(loaded, own)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == config["auto_map"]
    assert (tmp_path / "again" / "custom_generate" / "own_drafter.py").exists()
    HSDrafter.register_for_auto_class()
    assert HSDrafter._auto_class is None  # whose code always travels
