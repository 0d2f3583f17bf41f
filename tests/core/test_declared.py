"""Every library that the package imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOREIGN = {"vllm", "deepspeed"}  # of environments that a user brings, each behind a check


def imported() -> dict[str, str]:
    """The top names of all absolute imports, each with a file that imports it."""
    found = {}
    for file in sorted((ROOT / "hf_hsdraft").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            found |= {name.partition(".")[0]: str(file.relative_to(ROOT)) for name in names}
    return found


def test_every_import_of_another_library_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[\[<>=~!; ]", each)[0].replace("-", "_").lower() for some in lists for each in some}
    own = {*sys.stdlib_module_names, "hf_hsdraft", *FOREIGN}
    missing = {name: file for name, file in imported().items() if name.lower() not in declared and name not in own}
    assert missing == {}
