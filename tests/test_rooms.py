"""The rooms of the package: a module imports from its own room and from lower ones only, and never in a circle."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_hsdraft"
FLOORS = (
    "common",
    "trees",
    "verifiers",
    "pace",
    "acceleration",
    "target",
    "repository",
    "drafters",
    "engine",
    "",  # the root: what touches transformers, and the entry of a drafter's code
    "training",
    "bench",
    "hub",
    "commands",
    "cli",
)
WORKSHOP = {"training", "bench", "hub"}  # they use one another, and never travel
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent == PACKAGE)


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "cli.py":
        return "cli"
    return parts[0] if len(parts) > 1 else ""


def imported(path: Path, top_level_only: bool = False) -> list[Path]:
    """The files of the package that a module imports, by relative imports."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        folder = path.parents[node.level - 1]
        base = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
        if base.with_suffix(".py").is_file():
            found.append(base.with_suffix(".py"))
        else:
            found += [base / f"{alias.name}.py" for alias in node.names if (base / f"{alias.name}.py").is_file()]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_lower_rooms_only(path: Path) -> None:
    own = room_of(path)
    for other in imported(path):
        room = room_of(other)
        both_in_workshop = own in WORKSHOP and room in WORKSHOP
        assert both_in_workshop or FLOORS.index(room) <= FLOORS.index(own), f"{path} imports {other} of a higher room"


def test_nothing_is_imported_in_a_circle() -> None:
    graph = {path: imported(path) for path in MODULES}
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, " -> ".join(str(each.relative_to(PACKAGE)) for each in (*above, path))
        if path not in done:
            for other in graph.get(path, []):
                visit(other, (*above, path))
            done.add(path)

    for path in MODULES:
        visit(path, ())
