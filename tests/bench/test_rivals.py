"""`benchmarks/rivals.py`: a system that fails keeps its figures until then, and takes no other system's."""

from __future__ import annotations

import sys
from pathlib import Path

import rivals

WORKER = """
import json, sys
print('"ready"', flush=True)
for number, line in enumerate(sys.stdin):
    if number == {asked}:
        sys.exit("no more\\nat all")
    tokens = json.loads(line)["ids"] * 2
    print(json.dumps({{"tokens": tokens, "first": 0.5, "last": {last}, "peak": 2**21}}), flush=True)
"""


def system(asked: int, last: float) -> rivals.System:
    return rivals.System([sys.executable, "-c", WORKER.format(asked=asked, last=last)])


def test_a_system_fails_alone_and_says_why(tmp_path: Path):
    systems = {
        "plain float32": system(-1, 1.5),
        "quick": system(2, 1.0),  # the warm-up and the first prompt
        "early": system(0, 1.0),
        "absent": rivals.System([str(tmp_path / "python")]),
        "unasked": rivals.System(reason="not tried: no --openvino"),
    }
    saved = []
    rivals.measured(systems, [[1, 2], [3, 4], [5, 6]], 4, lambda: saved.append(len(systems["plain float32"].answers)))
    assert saved == [1, 2, 3]
    plain, quick, early, absent, unasked = rivals.rows(systems)
    assert plain[1:] == ["3.0", 1.0, "2.7", "500", "12 of 12", 2, None]
    assert quick[1:] == ["6.0", 2.0, "4.0", "500", "4 of 4", 2, quick[-1]]
    assert quick[-1] == "failed at prompt 2: its process ended with status 1: at all"
    assert early[-1] == "not tried: its process ended with status 1: at all"
    assert absent[-1].startswith("not tried: ") and "No such file" in absent[-1]
    assert unasked[1:] == [*[None] * 6, "not tried: no --openvino"]
