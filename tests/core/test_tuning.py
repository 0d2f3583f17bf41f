"""The tuned numbers: each says where it comes from, and is read somewhere."""

import re
from pathlib import Path

import hf_hsdraft

PACKAGE = Path(hf_hsdraft.__file__).parent
NUMBER = re.compile(r"([A-Z][A-Z_0-9]+)(?:: float)? = [^#]*(#.*)?")


def numbers(path: Path) -> dict[str, str]:
    """The tuned numbers of a file with their comments: numbers that follow one another share the one above them."""
    comments, told, after_number = {}, [], True
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            told = [line] if after_number else [*told, line]
        elif number := NUMBER.match(line):
            comments[number[1]] = number[2] or " ".join(told)
        after_number = not line.startswith("# ")
    return comments


SOURCED = re.compile(r" - \w")  # after the dash is where the value comes from


def test_tuned_numbers_say_where_they_come_from_and_are_read():
    shared = {path: numbers(path) for path in PACKAGE.glob("*/tuning.py")}
    assert not [name for found in shared.values() for name, comment in found.items() if not SOURCED.search(comment)]
    paths = list(PACKAGE.rglob("*.py"))
    found = {name for path in paths for name, comment in numbers(path).items() if SOURCED.search(comment)}
    assert len(found) >= 126, "a number lost its source"
    code = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert not [name for name in found if len(re.findall(rf"\b{name}\b", code)) < 2]
