"""The code that travels with a drafter: collected by its imports, flattened, with an entry that names its classes.

transformers looks for a repository's code only beside the entry file, by lines such as `from .module import name`. So
each file is copied under its own name into one folder, and its relative imports are rewritten to one dot and the name
of the file. That folder is `PLACE`, where transformers expects the recipe of `custom_generate`, so all code is in one
place. Earlier drafters have theirs at the top of the repository.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.checks import FORMAT_VERSION, is_code_file
from .drafter_files import CONFIG, read_json

ENTRY = "hub_entry"  # of travelling code
PLACE = "custom_generate"  # folder of all code in a repository
RECIPE = Path(__file__).with_name("generate_recipe.py")
_PACKAGE = Path(__file__).resolve().parents[1]
_WITHOUT_NETWORK = _PACKAGE / "drafters/base/travelling_drafter.py"
_ENTRY = '''"""The entry of a drafter's code, as `auto_map` in config.json names it.

Where `hf_hsdraft` is installed, its classes are loaded, and no other file here is run. They draft trees and batches. By
the files beside this one {without}.
"""

from __future__ import annotations

try:
    from hf_hsdraft import {config}, {drafter}

    if {config}().format_version < {version}:
        raise ImportError("the installed hf_hsdraft is older than this drafter")
except ImportError:
{classes}
    install()

__all__ = ["{config}", "{drafter}"]
'''
_OWN_NETWORK = """\
    from .{module} import {name} as {drafter}
    from .{config_module} import {config}
    from .travelling_drafter import install
"""
_NO_NETWORK = """\
    from transformers import PreTrainedConfig

    from .travelling_drafter import PlainDrafter, install

    class {config}(PreTrainedConfig):
        model_type = "{model_type}"

    class {drafter}(PlainDrafter):
        config_class = {config}
"""
_RELATIVE = re.compile(r"from\s+\.[.\w]*\s+import\b")


@functools.lru_cache(maxsize=64)
def _imports(text: str) -> tuple[tuple[int, int, str], ...]:
    """Line number, number of dots and module of each relative import; each checkpoint of a training asks for them."""
    nodes = ast.walk(ast.parse(text))
    found = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.level)
    return tuple((node.lineno, node.level, node.module or "") for node in found)


def flattened(path: Path) -> tuple[str, list[Path]]:
    """A module's text with each relative import rewritten to `from .file import ...`, and the files that it imports.

    Raises an ImportError if an import names no file.
    """
    text, files = path.read_text(encoding="utf-8"), list[Path]()
    lines = text.splitlines(keepends=True)
    for line, dots, module in _imports(text):
        file = path.parents[dots - 1].joinpath(*module.split(".")).with_suffix(".py")
        if not module or not file.is_file():
            raise ImportError(
                f"{path.name}, line {line}: expected `from {'.' * dots}file import name` with a file of that name, as "
                "code that travels with a drafter has to import"
            )
        lines[line - 1] = _RELATIVE.sub(f"from .{file.stem} import", lines[line - 1], count=1)
        files.append(file.resolve())
    return "".join(lines), files


def write_flat(entries: Sequence[Path], folder: Path) -> list[str]:
    """Writes some files and all that they import, flattened, into a folder; returns the names.

    Raises an ImportError, before it writes anything, if two files of the same name would collide.
    """
    texts, waiting = dict[Path, str](), [path.resolve() for path in entries]
    while waiting:
        path = waiting.pop()
        if path not in texts:
            texts[path], imported = flattened(path)
            waiting += imported
    names = sorted(path.name for path in texts)
    if twice := [one for one, other in itertools.pairwise(names) if one == other]:
        raise ImportError(
            f"code that travels with a drafter needs a different name for each file: there are several {twice[0]}"
        )
    for path, text in texts.items():
        (folder / path.name).write_text(text, encoding="utf-8")
    return names


def write_code(family: Any, folder: Path) -> str:
    """Writes a drafter family's code into a folder; returns the module that its classes are loaded from.

    A family of this package brings an entry, which uses the package where it is installed, and what drafts without it.
    A foreign family brings the files of its class and its configuration, which import this package.
    """
    config = family.config_class
    own, of_config = (Path(inspect.getfile(each)).resolve() for each in (family, config))
    if not own.is_relative_to(_PACKAGE):
        write_flat([own, of_config], folder)
        return own.stem
    alone = family.travels_as
    names = {"config": config.__name__, "drafter": family.__name__, "version": FORMAT_VERSION}
    if alone is None:
        write_flat([_WITHOUT_NETWORK], folder)
        without, classes = "all texts are decoded plainly", _NO_NETWORK.format(**names, model_type=config.model_type)
    else:
        path = Path(inspect.getfile(alone)).resolve()
        write_flat([path, of_config], folder)
        modules = {"module": path.stem, "config_module": of_config.stem}
        without = "chains are drafted for one text a call"
        classes = _OWN_NETWORK.format(**names, **modules, name=alone.__name__)
    entry = _ENTRY.format(**names, classes=classes, without=without)
    (folder / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
    return ENTRY


def stands_alone(auto_map: Any) -> bool:
    """Whether the travelling code runs without the package; that of foreign families imports it."""
    entries = (f"{ENTRY}.", "modeling_hsdraft.")  # the latter in older drafters
    return isinstance(auto_map, dict) and str(auto_map.get("AutoModel")).removeprefix(f"{PLACE}/").startswith(entries)


def former_code(folder: Path) -> set[str]:
    """Returns the names of the code files saved with a drafter, by its configuration or what the entries import."""
    config = read_json(folder / CONFIG)
    listed, auto_map = config.get("code_files"), config.get("auto_map")
    if listed is not None:
        placed = isinstance(auto_map, dict) and str(auto_map.get("AutoModel")).startswith(f"{PLACE}/")
        names = filter(is_code_file, listed) if isinstance(listed, list) else ()
        return {f"{PLACE}/{name}" if placed else name for name in names}
    entries = auto_map.values() if isinstance(auto_map, dict) else ()
    found, waiting = set(), ["generate_recipe", *(str(entry).partition(".")[0] for entry in entries)]
    while waiting:
        path = folder / f"{waiting.pop()}.py"
        if is_code_file(path.name) and path.name not in found and path.is_file():
            found.add(path.name)
            waiting += re.findall(r"^\s*from \.(\w+) import", path.read_text(encoding="utf-8", errors="replace"), re.M)
    return found
