"""Many devices and one server that verifies: `python -m hf_hsdraft.bench.remote_sessions --out sessions.json`.

A server runs in a process of its own, and each device in another one. Between them is a relay that adds latency and
limits bandwidth. Each way of drafting is compared with the server decoding plainly for the same devices, and with one
call of `generate()` for all texts. Each text is compared with plain `generate()`. `--soak-minutes 10` lets devices
decode without end while they are killed at random. The command ends with 1 if a text came out otherwise or something
failed.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from .remote_figures import faults_of, measured, print_rows
from .remote_orders import links_of, order_of
from .remote_plain import Plain, plain_texts
from .remote_processes import Devices, served, status_of
from .remote_relay import relay
from .remote_soak import soaked

console = Console(width=150)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--target", default=None, help="Hub name or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--drafters",
        default="generate,none,ngrams",
        help="generate (one call for all texts, without a server), none (the server alone), ngrams, folders, Hub names",
    )
    parser.add_argument("--sessions", default="1,4,16,64")
    parser.add_argument("--round-trip-ms", default="", help="default: 0,20,80; of a soak the first one, default: 0")
    parser.add_argument("--mbit", default="", help="of each connection; empty for no limit; of a soak the first one")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=1, help="of each device")
    parser.add_argument("--most-taps", type=int, default=None, help="positions of the prompt whose taps are fetched")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--wait-ms", type=float, default=None, help="default: the server's own")
    parser.add_argument("--packed", action="store_true", help="the server packs its weights")
    parser.add_argument("--sample", action="store_true", help="draw tokens; else greedy")
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--timeout-seconds", type=float, default=1800.0, help="after which a row has failed")
    parser.add_argument(
        "--stuck-seconds", type=float, default=60.0, help="without tokens, after which a device is stuck"
    )
    parser.add_argument("--out", type=Path, default=Path("remote_sessions.json"))
    return parser.parse_args()


def _print(row: dict[str, Any]) -> None:
    console.print(json.dumps(row), highlight=False, soft_wrap=True)


def sweep(asked: argparse.Namespace, plain: Plain, port: int, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Runs all combinations of drafter, devices, latency and bandwidth; prints and keeps a row for each."""
    rows, devices = list(plain.rows), Devices()
    drafters = [name for name in asked.drafters.split(",") if name != "generate"]
    keep(rows)
    try:
        for milliseconds, mbit in links_of(asked, "0,20,80"):
            with relay(port, milliseconds / 1e3, mbit * 125_000) as there:
                for drafter, count in ((name, int(count)) for name in drafters for count in asked.sessions.split(",")):
                    row: dict[str, Any] = {"drafter": Path(drafter).name, "sessions": count}
                    row |= {"round_trip_ms": milliseconds, "mbit": None if math.isinf(mbit) else mbit}
                    before = status_of(port)
                    try:
                        found = devices.run(order_of(asked, there, drafter, count, plain.prompts))
                        row |= measured(found, before, status_of(port), plain.texts, drafter == "none")
                    except (RuntimeError, TimeoutError) as error:  # the other rows are measured all the same
                        row |= {"error": str(error)}
                    rows.append(row)
                    _print(row)
                    keep(rows)
    finally:
        devices.close()


def main() -> int:
    """The command; 1 if something has gone wrong."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is ended too
    plain, result = plain_texts(asked, _print), dict[str, Any]()

    def keep(**news: Any) -> None:
        result.update(news, status=status_of(port))
        partial = asked.out.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        partial.replace(asked.out)

    with served(asked) as (port, pid):
        if asked.soak_minutes:
            keep(soak=soaked(asked, plain, port, pid, console))
            console.print(result["soak"])
        else:
            sweep(asked, plain, port, lambda rows: keep(rows=rows))
            print_rows(result["rows"], result["status"], console)
    faults = faults_of(result)
    for each in faults:
        console.print(f"fault: {each}", highlight=False)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
