"""Tests that all tree builders and exact verifiers emit the target's own distribution; exits with 1 if not.

    python benchmarks/exactness.py --samples 200000 --part 1/2

Each setting draws rounds from a target whose probabilities are known exactly; see `tests/oracles/exactness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from runner import names, options, print_table

_COLUMNS = ("verifier", "builder", "processor", "temperature", "p", "drafts accepted a round")


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share such as 1/4")
    return int(index), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--samples", type=int, default=200_000, help="rounds drawn for each setting; default: 200000")
    parser.add_argument("--processors", type=names, help="default: all")
    parser.add_argument("--part", type=_part, default=(1, 1), help="i/n: the i-th of n shares, to run side by side")
    given = parser.parse_args(arguments)
    from oracles.exactness import PROCESSORS, Outcome, check, settings

    chosen = given.processors or list(PROCESSORS)
    if not set(chosen) <= set(PROCESSORS):
        parser.error(f"--processors: expected some of {', '.join(PROCESSORS)}")
    index, count = given.part
    mine, worst = list(settings(chosen))[index - 1 :: count], 1.0

    def row(found: Outcome) -> list[object]:
        nonlocal worst
        worst = min(worst, found.p_value)
        return [*found.setting, f"{found.p_value:.4f}", f"{found.accepted:.3f}"]

    print_table(_COLUMNS, (row(check(*setting, samples=given.samples)) for setting in mine))
    limit = 1e-3 / len(mine)  # one run in a thousand fails by chance
    verdict = "exact as far as this can tell" if worst >= limit else "NOT the target's distribution"
    print(
        f"\n{len(mine)} settings of {given.samples} samples, least p-value {worst:.5f} (limit {limit:.5f}): {verdict}"
    )
    return int(worst < limit)


if __name__ == "__main__":
    sys.exit(main())
