"""The code that travels with a drafter: found by its imports, and flattened.

transformers looks for a repository's code beside the entry file only, by lines such as `from .module import name`. So
each file is copied under its own name into one folder, and its relative imports are rewritten to one dot and the name
of the file. Rewriting a file that is flat already gives the same file, so a drafter that was loaded from the Hub can be
saved again without the package.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_RELATIVE = re.compile(r"from\s+\.[.\w]*\s+import\b")


def relative_imports(path: Path) -> Iterator[tuple[int, Path]]:
    """Line number (from 0) and file of each relative import of a module.

    Raises:
        ImportError: an import names no file: travelling code imports names from files, never a package or a folder.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = (node.module or "").split(".")
            file = path.parents[node.level - 1].joinpath(*parts).with_suffix(".py")
            if not node.module or not file.is_file():
                raise ImportError(
                    f"{path.name}, line {node.lineno}: expected `from {'.' * node.level}file import name` with a file "
                    "of that name, as code that travels with a drafter has to import"
                )
            yield node.lineno - 1, file


def closure(entries: Sequence[Path]) -> list[Path]:
    """Some files and all that they import, directly or not, ordered by name.

    Raises:
        ImportError: see `relative_imports`; or two files have the same name, and could not lie in one folder.
    """
    found: set[Path] = set()
    waiting = [path.resolve() for path in entries]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [file.resolve() for _, file in relative_imports(path)]
    files = sorted(found, key=lambda path: path.name)
    twice = sorted({one.name for one, other in itertools.pairwise(files) if one.name == other.name})
    if twice:
        raise ImportError(f"code that travels with a drafter needs names of its own: there are several {twice[0]}")
    return files


def flattened(path: Path) -> str:
    """The text of a module with every relative import rewritten to `from .file import ...`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for line, file in relative_imports(path):
        lines[line] = _RELATIVE.sub(f"from .{file.stem} import", lines[line], count=1)
    return "".join(lines)


def write_flat(entries: Sequence[Path], folder: Path) -> list[str]:
    """Writes the closure of some files into a folder, flattened; returns the names of the files."""
    files = closure(entries)
    for path in files:
        (folder / path.name).write_text(flattened(path), encoding="utf-8")
    return [path.name for path in files]
