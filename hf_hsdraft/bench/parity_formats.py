"""Parity of published formats with the implementations that they come from, as a table.

    python -m hf_hsdraft.bench.parity_formats

A family of drafters adds its cases to `CASES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from .block_parity import CASES as BLOCKS
from .block_parity import parity as of_block
from .eagle_parity import CASES as EAGLES
from .eagle_parity import parity as of_eagle
from .format_parity import Parity

CASES: dict[str, Callable[[], Parity]] = {
    **{case.name: partial(of_block, case) for case in BLOCKS},
    **{case.name: partial(of_eagle, case) for case in EAGLES},
}


def table(names: list[str]) -> str:
    """Returns the figures of some cases, a line each; of all cases if no names are given."""
    lines = [f"{'format':<46} {'reference':<28} {'largest difference':>18} {'rounds':>7} {'accepting':>9}"]
    for name in names or CASES:
        found = CASES[name]()
        line = f"{found.format:<46} {found.reference:<28} {found.difference:>18.1e} {found.rounds:>7} "
        lines.append(f"{line}{found.accepted:>9}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1:]))
