"""Parity of published formats with their reference implementations, as a table.

    PYTHONPATH=JetSpec:DeepSpec python benchmarks/format_parity.py ["z-lab DFlash" ...]

The cases of each family are in `tests/oracles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from runner import options, print_table

_COLUMNS = ("format", "verdict", "reference", "largest difference", "rounds", "accepting")
_RIGHT = 1e-4  # largest difference of a drafter that is read right, in float32


def cases() -> dict[str, Callable[[], Any]]:
    """Returns the comparison of each case, by its name."""
    from oracles import (
        assistant_parity,
        block_parity,
        block_variants,
        eagle_parity,
        flashmap_parity,
        heads_parity,
        mtp_alone_parity,
        mtp_parity,
        pard_parity,
    )

    families = (
        assistant_parity, block_parity, block_variants, eagle_parity, flashmap_parity, heads_parity,
        mtp_alone_parity, mtp_parity, pard_parity,
    )  # fmt: skip
    return {
        case.name: partial(family.parity, case)
        for family in families
        for case in (*family.CASES, *getattr(family, "REFUSED", ()))
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run; default: all")
    given, known = parser.parse_args(arguments).names, cases()
    if unknown := set(given) - set(known):
        parser.error(f"no case {', '.join(unknown)}: expected some of {', '.join(known)}")

    from hf_hsdraft.core.refusals import DraftingRefused

    def row(name: str) -> list[Any]:
        try:
            found = known[name]()
        except ModuleNotFoundError as error:
            if "." in str(error.name):  # a module of a package that is there
                raise
            return [name, "-", f"needs the package {error.name}", "-", "-", "-"]
        except (ValueError, DraftingRefused) as error:
            return [name, f"refused: {error}", "-", "-", "-", "-"]
        verdict = "right" if found.difference < _RIGHT else "WRONG"
        return [name, verdict, found.reference, f"{found.difference:.1e}", found.rounds, found.accepted]

    print_table(_COLUMNS, map(row, given or known))


if __name__ == "__main__":
    main()
