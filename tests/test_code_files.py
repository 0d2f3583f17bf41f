"""The code that travels with a drafter: which files, and how they are flattened."""

import ast
import importlib
import json
from pathlib import Path

import pytest
from conftest import make_drafter, make_target
from hf_hsdraft.hub.care import care
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import hf_hsdraft
from hf_hsdraft import HSDraftConfig, HSDrafter
from hf_hsdraft.hub.code_files import closure, flattened, relative_imports, write_flat

PACKAGE = Path(hf_hsdraft.__file__).parent
FAMILY = PACKAGE / "drafters/hidden_state"
ENTRIES = [PACKAGE / "generate/generate_hook.py", FAMILY / "modeling_hsdraft.py", FAMILY / "configuration_hsdraft.py"]


def test_every_file_that_is_imported_comes_along_under_its_own_name():
    files = closure(ENTRIES)
    stems = [path.stem for path in files]
    assert len(set(stems)) == len(stems)
    assert {"generate_hook", "modeling_hsdraft", "draft_tree"} <= set(stems)
    for path in files:
        assert {file.resolve() for _, file in relative_imports(path)} <= set(files)


def test_what_travels_asks_for_no_package_and_no_workshop():
    for path in closure(ENTRIES):
        text = path.read_text()
        assert path.relative_to(PACKAGE).parts[0] not in ("training", "bench", "serve", "cli")
        names = [
            name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            )
        ]
        assert not [name for name in names if name.split(".")[0] == "hf_hsdraft"], path


def test_flattening_what_is_flat_changes_nothing(tmp_path):
    assert care().write_code(HSDrafter, tmp_path) == "hub_entry"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert {path.name for path in closure(ENTRIES)} < set(names)
    again = tmp_path / "again"
    again.mkdir()
    entries = [tmp_path / f"{stem}.py" for stem in ("hub_entry", "configuration_hsdraft", "generate_recipe")]
    assert write_flat(entries, again) == names
    for name in names:
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()
        assert flattened(tmp_path / name) == (tmp_path / name).read_text()


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
        closure([package(tmp_path, **files) / "entry.py"])


def test_a_saved_drafter_names_entry_and_code(tmp_path):
    drafter = make_drafter(make_target())
    drafter.register_for_auto_class()
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_hsdraft.HSDraftConfig",
        "AutoModel": "hub_entry.HSDrafter",
    }
    assert config["code_files"] == sorted(path.name for path in tmp_path.glob("*.py"))
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
    assert not (tmp_path / "plain" / "own_drafter.py").exists()
    assert type(HSDrafter.from_pretrained(tmp_path / "plain")) is HSDrafter
    own.register_for_auto_class()
    drafter.save_pretrained(tmp_path / "registered")
    config = json.loads((tmp_path / "registered" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "own_drafter.OwnDrafter"
    assert {"own_drafter.py", "hub_entry.py"} <= set(config["code_files"])
    # As `AutoModel` does where the package was not imported before; else it takes what the package registered.
    remote = get_class_from_dynamic_module(config["auto_map"]["AutoModel"], tmp_path / "registered")
    remote.register_for_auto_class(AutoModel)
    loaded = remote.from_pretrained(tmp_path / "registered")
    assert loaded.mine and isinstance(loaded, HSDrafter) and not isinstance(loaded, own)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == config["auto_map"]
    assert (tmp_path / "again" / "own_drafter.py").exists()
    HSDrafter.register_for_auto_class()
    assert HSDrafter._auto_class is None  # whose code always travels


def test_the_card_and_the_sending_do_not_travel():
    stems = {path.stem for path in closure(ENTRIES)}
    assert "care" in stems and not {"package_care", "model_card", "code_files"} & stems
