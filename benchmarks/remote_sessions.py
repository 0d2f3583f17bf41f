"""Many devices and one server that verifies: `python benchmarks/remote_sessions.py --json sessions.json`.

The server and each device run in separate processes, with a relay between them that adds latency and limits bandwidth.
Each drafter is compared with the server decoding plainly for the same devices, and with one call of `generate()` for
all texts. Each text is compared with plain `generate()`. `--soak-minutes 10` lets devices decode while they are killed
at random. The command exits with 1 if a text differs or something failed.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import counts, keep, options

if TYPE_CHECKING:
    from remote_bench.plain import Plain


def _arguments(arguments: Sequence[str] | None) -> Namespace:
    parser = options(__doc__, target=None, drafter=None, max_new_tokens=96, json=Path("remote_sessions.json"))
    drafters = (
        "generate (one call for all texts, without a server), none (the server alone), ngrams, folders, Hub names"
    )
    parser.epilog = f"drafters: {drafters}; default: the first three"
    parser.add_argument("--sessions", type=counts, default=[1, 4, 16, 64], help="devices; default: 1,4,16,64")
    parser.add_argument("--round-trip-ms", default="", help="default: 0,20,80; a soak uses the first one, default: 0")
    parser.add_argument("--mbit", default="", help="limit of a connection; default: none; a soak uses the first one")
    parser.add_argument("--texts", type=int, default=1, help="texts of each device")
    parser.add_argument("--most-taps", type=int, help="last prompt positions whose taps are fetched")
    parser.add_argument("--max-batch", type=int, default=32, help="default: 32")
    parser.add_argument("--wait-ms", type=float, help="default: the server's own")
    parser.add_argument("--packed", action="store_true", help="the server packs its weights")
    parser.add_argument("--sample", action="store_true", help="sample; default: greedy")
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="kill devices at random for so long")
    parser.add_argument("--timeout-seconds", type=float, default=1800.0, help="seconds after which a row has failed")
    parser.add_argument(
        "--stuck-seconds", type=float, default=60.0, help="without tokens, until a device counts as stuck"
    )
    given = parser.parse_args(arguments)
    given.drafter = given.drafter or ["generate", "none", "ngrams"]
    return given


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def sweep(asked: Namespace, plain: Plain, port: int, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Runs all combinations of drafter, devices, latency and bandwidth; prints and keeps a row for each."""
    from oracles.remote_server import relay
    from remote_bench.clients import Order
    from remote_bench.figures import measured
    from remote_bench.processes import Devices, links_of, status_of

    rows, devices = list(plain.rows), Devices()
    asks = [(name, count) for name in asked.drafter if name != "generate" for count in asked.sessions]
    save(rows)
    try:
        for milliseconds, mbit in links_of(asked, "0,20,80"):
            with relay(port, milliseconds / 1e3, mbit * 125_000) as there:
                for drafter, count in asks:
                    row: dict[str, Any] = {"drafter": Path(drafter).name, "sessions": count}
                    row |= {"round_trip_ms": milliseconds, "mbit": None if math.isinf(mbit) else mbit}
                    before = status_of(port)
                    try:
                        found = devices.run(Order.of(asked, there, drafter, count, plain.prompts))
                        row |= measured(found, before, status_of(port), plain.texts, drafter == "none")
                    except (RuntimeError, TimeoutError) as error:  # the other rows are measured all the same
                        row |= {"error": str(error)}
                    rows.append(row)
                    _print(row)
                    save(rows)
    finally:
        devices.close()


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _arguments(arguments)
    from remote_bench.figures import faults_of, print_rows
    from remote_bench.plain import plain_texts
    from remote_bench.processes import served, status_of
    from remote_bench.soak import soaked

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is ended too
    plain, result = plain_texts(asked, _print), dict[str, Any]()

    def save(**news: Any) -> None:
        result.update(news, status=status_of(port))
        keep(asked.json, result)

    with served(asked) as (port, pid):
        if asked.soak_minutes:
            save(soak=soaked(asked, plain, port, pid))
            print(result["soak"])
        else:
            sweep(asked, plain, port, lambda rows: save(rows=rows))
            print_rows(result["rows"], result["status"])
    faults = faults_of(result)
    for each in faults:
        print(f"fault: {each}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
