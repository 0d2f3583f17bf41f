"""How many devices a verifying server serves, by a model of queues; nothing is run.

    python benchmarks/fleet.py --fixed-ms 20 --column-ms 0.05 --token-bytes 131072 --gibibytes 40 --tau 2.5 --nodes 8
    python benchmarks/fleet.py --from remote_sessions.json --gibibytes 8 --tau 1.4 --nodes 3

The defaults are made up: measure your own by `python benchmarks/remote_sessions.py`, and give them by --from.

N devices repeat a round: each drafts and waits for the round trip (Z seconds), then for the forward that is running,
then for its own. A forward over b texts takes f(b) = fixed + per_column * b * columns. A busy server begins each
forward as the last one ends. So a device that was away for Z seconds has missed w = ceil(Z / f(b)) forwards when it is
read again; with Z = 0 it misses none. w is averaged over Z varying by up to 30% either way. N = b * (1 + w) is solved
for b. A batch below one text means that the server waits for devices, and one above the limit that devices wait for the
server. The time that a batch waits for other texts is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner import options, print_table

_SPREAD = 0.3  # relative spread of the time away


@dataclass(frozen=True)
class ServerCosts:
    """Costs of a server's forwards."""

    fixed_seconds: float  # per forward, however little it reads
    column_seconds: float  # per node of each text
    token_bytes: int  # keys and values of a token
    free_bytes: int  # memory for keys and values
    most_texts: int = 32  # maximum per forward

    def forward(self, texts: float, columns: float) -> float:
        """Seconds of a forward over `texts` texts with `columns` nodes each, root included."""
        return self.fixed_seconds + self.column_seconds * texts * columns


@dataclass(frozen=True)
class DeviceLoad:
    """A device's work in one round."""

    tokens: float = 1.0  # emitted, the target's own included
    columns: float = 1.0  # nodes that a forward reads per text: the size of the largest tree, root included
    draft_seconds: float = 0.0
    sent: float = 0.0  # bytes
    received: float = 0.0  # bytes
    round_trip_seconds: float = 0.0
    bytes_per_second: float = math.inf  # of the link, each way; infinite to ignore it
    length: int = 1024  # tokens of a finished text

    @property
    def away(self) -> float:
        """Seconds of a round that are not spent at the server."""
        return self.draft_seconds + self.round_trip_seconds + (self.sent + self.received) / self.bytes_per_second


@dataclass(frozen=True)
class FleetPoint:
    """Performance of a number of devices on one server."""

    sessions: int
    batch: float  # texts per forward
    busy: float  # share of the time that the server reads
    tokens_per_second: float
    each_tokens_per_second: float
    sent: float  # bytes per second from all devices
    received: float  # bytes per second to all devices
    cache_bytes: int  # keys and values of all texts
    fits: bool  # whether these fit into the server's memory


def fleet_point(server: ServerCosts, load: DeviceLoad, sessions: int) -> FleetPoint:
    """Returns the performance of `sessions` devices on one server."""
    batch = _batch(server, load, sessions)
    seconds = server.forward(batch, load.columns)
    if batch >= server.most_texts:  # devices wait for the server
        rate, busy = server.most_texts / seconds, 1.0
    elif sessions >= _devices(server, load, 1.0):
        rate, busy = batch / seconds, 1.0
    else:  # the server waits for devices; one of them meets the forward of another by chance
        rate = sessions / (load.away + seconds)
        for _ in range(50):
            busy = min(rate * seconds, 1.0) * (sessions - 1) / sessions
            rate = sessions / (load.away + seconds * (1.0 + busy / 2))
        busy = min(rate * seconds, 1.0)
    memory = sessions * load.length * server.token_bytes
    return FleetPoint(
        sessions,
        batch,
        busy,
        rate * load.tokens,
        rate * load.tokens / sessions,
        rate * load.sent,
        rate * load.received,
        memory,
        memory <= server.free_bytes,
    )


def _batch(server: ServerCosts, load: DeviceLoad, sessions: int) -> float:
    """Texts per forward: the b of the module's equation, from 1 to the limit."""
    low, high = 1.0, float(server.most_texts)
    for _ in range(60):
        batch = (low + high) / 2
        if _devices(server, load, batch) < sessions:
            low = batch
        else:
            high = batch
    return 1.0 if low < 1.0 + 1e-9 else min(high, sessions)


def _devices(server: ServerCosts, load: DeviceLoad, batch: float) -> float:
    """Number of devices that fills forwards of `batch` texts: the N of the module's equation."""
    missed = load.away / server.forward(batch, load.columns)
    least, most = (1 - _SPREAD) * missed, (1 + _SPREAD) * missed
    return batch * (1 + ((_ceil_area(most) - _ceil_area(least)) / (most - least) if missed else 0.0))


def _ceil_area(end: float) -> float:
    """The integral of ceil(x) from 0 to `end`."""
    whole = math.floor(end)
    return whole * (whole + 1) / 2 + (end - whole) * (whole + 1)


def saturates_at(server: ServerCosts, load: DeviceLoad) -> int:
    """Returns the number of devices from which on throughput no longer grows."""
    return math.ceil(_devices(server, load, server.most_texts))


def most_sessions(server: ServerCosts, load: DeviceLoad, least_tokens_per_second: float) -> int:
    """Returns how many devices one server sustains at this rate each; 0 if not one."""
    by_memory = server.free_bytes // max(load.length * server.token_bytes, 1)
    low, high = 0, max(by_memory, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if fleet_point(server, load, middle).each_tokens_per_second >= least_tokens_per_second:
            low = middle
        else:
            high = middle - 1
    return low


def costs_of(path: Path, others: ServerCosts) -> ServerCosts:
    """Returns the costs in the JSON that `python benchmarks/remote_sessions.py` wrote, with `free_bytes` from `others`.

    Raises a ValueError if the file is missing, or not written by that benchmark.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}; `python benchmarks/remote_sessions.py` writes one")
    try:
        status = json.loads(path.read_text(encoding="utf-8"))["status"]
        return replace(
            costs_of_status(status), free_bytes=others.free_bytes, most_texts=int(status["limits"]["max_batch"])
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} holds no status of a server: expected what the bench remote_sessions wrote") from None


def costs_of_status(status: dict[str, Any]) -> ServerCosts:
    from hf_hsdraft.remote.micro_batches import fitted_line

    batches = status["batches"]
    names = ("forwards", "columns", "columns_squared", "verify_seconds", "columns_seconds")
    fixed, slope = fitted_line([float(batches[name]) for name in names])
    limits = status["limits"]
    return ServerCosts(fixed, slope, int(status["token_bytes"]), int(limits["max_bytes"]), int(limits["max_batch"]))


def print_fleet(server: ServerCosts, load: DeviceLoad, least: float) -> None:
    """Prints a table of performance by number of devices; each should get `least` tokens per second."""
    plain = DeviceLoad(length=load.length)  # the server alone: one token per round, no round trip
    print(
        f"a forward takes {server.fixed_seconds * 1e3:.2f} ms and {server.column_seconds * 1e3:.3f} ms for each node "
        f"of each text; a device is away for {load.away * 1e3:.1f} ms of each round"
    )
    columns = "devices", "batch", "busy", "tokens/s", "each", "plain", "in KB/s", "out KB/s", "cache MiB", "fits"
    rows = []
    for sessions in (1, 4, 16, 64, 256, 1024):
        point, alone = fleet_point(server, load, sessions), fleet_point(server, plain, sessions)
        speeds = point.tokens_per_second, point.each_tokens_per_second, alone.tokens_per_second
        traffic = point.sent / 1e3, point.received / 1e3, point.cache_bytes / 2**20
        fits = "yes" if point.fits else "no"
        rows.append([str(sessions), point.batch, f"{point.busy:.0%}", *speeds, *traffic, fits])
    print_table(columns, rows)
    print(
        f"the server emits no more from {saturates_at(server, load)} devices on; {most_sessions(server, load, least)} "
        f"get {least:g} tokens/s each"
    )


# Default and least value of each option, and what it is
_OPTIONS: dict[str, tuple[float, float, str]] = {
    "fixed-ms": (20.0, 0.001, "time of a forward, independent of its size"),
    "column-ms": (0.05, 0.0, "time that each node adds to a forward"),
    "token-bytes": (131072, 1, "bytes of keys and values per token"),
    "gibibytes": (40.0, 0.0, "memory for keys and values"),
    "max-batch": (32, 1, "maximum number of texts per forward"),
    "tau": (2.5, 1.0, "tokens emitted per round"),
    "nodes": (8.0, 0.0, "drafted nodes per round"),
    "draft-ms": (5.0, 0.0, "drafting time of a device"),
    "round-trip-ms": (40.0, 0.0, "network round-trip time"),
    "sent": (80.0, 0.0, "bytes sent by a device per round"),
    "received": (60.0, 0.0, "bytes received by a device per round"),
    "mbit-per-second": (20.0, 0.001, "speed of a device's link"),
    "length": (1024, 1, "tokens per text, prompt included"),
    "least": (10.0, 0.001, "minimum tokens/s for each device"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    measured = "JSON of remote_sessions.py; its values replace fixed-ms, column-ms, token-bytes and max-batch"
    parser.add_argument("--from", dest="measured", type=Path, help=measured)
    for name, (default, least, text) in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=f"{text}; default: {default:g}")
    given = parser.parse_args(argv)
    memory = int(given.gibibytes * 2**30)
    server = ServerCosts(
        given.fixed_ms / 1e3, given.column_ms / 1e3, int(given.token_bytes), memory, int(given.max_batch)
    )
    if given.measured is not None:
        server = costs_of(given.measured, server)
    load = DeviceLoad(
        given.tau, given.nodes + 1, given.draft_ms / 1e3, given.sent, given.received, given.round_trip_ms / 1e3,
        given.mbit_per_second * 125_000, int(given.length),
    )  # fmt: skip
    print_fleet(server, load, given.least)


def _at_least(least: float) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected {least:g} or more")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
