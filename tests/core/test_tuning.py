"""The tuned numbers of several files: each says where it comes from, and is read somewhere."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("room", ["core", "pace"])
def test_every_tuned_number_says_where_it_comes_from_and_is_read(room):
    found = numbers(PACKAGE / room / "tuning.py")
    assert len(found) > 5
    silent = [name for name, comment in found.items() if not re.search(r"(^|[^#]) - \w|# - \w", comment)]
    assert not silent
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "tuning.py")
    assert not [name for name in found if not re.search(rf"\b{name}\b", code)]
