"""The files that one greedy round of one text passes through, with their lines.

    python benchmarks/round_files.py [--functions]

Traces a call with a tiny hidden-state drafter from its second round on, and prints the round that passes through most
files. Costs are given, so every run drafts the same; all other options are the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner import options


def _counted(files: Iterable[str]) -> str:
    from oracles.round_trace import PACKAGE

    lines = [len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files]
    return f"{len(lines)} files, {sum(lines):,} lines"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--functions", action="store_true", help="print the functions of each file too")
    given = parser.parse_args(arguments)
    from oracles.round_trace import needed, traced_round

    found = traced_round()
    for file in sorted(found):
        print(file, _counted([file]).split(", ")[1], sep=": ")
        if given.functions:
            print(*(f"    {name}" for name in sorted(found[file])), sep="\n")
    print(_counted(found), f"{_counted(needed(found))} without cpu/ and gpu/", sep="; ")


if __name__ == "__main__":
    main()
