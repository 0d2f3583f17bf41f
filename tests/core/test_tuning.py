"""The tuned numbers: each says where it comes from, and code reads them nowhere else."""

import dataclasses
import inspect
import re
from pathlib import Path

import hf_hsdraft
from hf_hsdraft.core.tuning import TUNING, Tuning

PACKAGE = Path(hf_hsdraft.__file__).parent


def test_every_tuned_number_says_where_it_comes_from():
    """Beside it, or above it; fields that follow one another share the comment above them."""
    comments, told, after_field = {}, [], True
    for line in inspect.getsource(Tuning).splitlines():
        comment, field = re.match(r"    # (?!---)(.*)", line), re.match(r"    (\w+): [^#]*(#.*)?", line)
        if comment:
            told = [] if after_field else told
            told.append(comment[1])
        elif field:
            comments[field[1]] = field[2] or " ".join(told)
        after_field = comment is None
    assert list(comments) == [field.name for field in dataclasses.fields(Tuning)]
    silent = [name for name, text in comments.items() if not re.search(r" - \w", text)]
    assert not silent


def test_every_tuned_number_is_read_somewhere():
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    unread = [field.name for field in dataclasses.fields(TUNING) if f"TUNING.{field.name}" not in code]
    assert not unread
