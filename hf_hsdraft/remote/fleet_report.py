"""The plan of a fleet as a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .fleet import DeviceLoad, ServerCosts, fitted_line, fleet_point, most_sessions, plain_load, saturates_at

_SESSIONS = (1, 4, 16, 64, 256, 1024)


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
    batches = status["batches"]
    names = ("forwards", "columns", "columns_squared", "verify_seconds", "columns_seconds")
    fixed, slope = fitted_line([float(batches[name]) for name in names])
    limits = status["limits"]
    return ServerCosts(fixed, slope, int(status["token_bytes"]), int(limits["max_bytes"]), int(limits["max_batch"]))


def print_fleet(server: ServerCosts, load: DeviceLoad, least: float, console: Console) -> None:
    """Prints a table of performance by number of devices; each should get `least` tokens per second."""
    table = Table("devices", "batch", "busy", "tokens/s", "each", "plain", "in KB/s", "out KB/s", "cache MiB", "fits")
    plain = plain_load(load)
    for sessions in _SESSIONS:
        point, alone = fleet_point(server, load, sessions), fleet_point(server, plain, sessions)
        table.add_row(
            str(sessions),
            f"{point.batch:.1f}",
            f"{point.busy:.0%}",
            f"{point.tokens_per_second:.1f}",
            f"{point.each_tokens_per_second:.2f}",
            f"{alone.tokens_per_second:.1f}",
            f"{point.sent / 1e3:.1f}",
            f"{point.received / 1e3:.1f}",
            f"{point.cache_bytes / 2**20:.0f}",
            "yes" if point.fits else "no",
        )
    console.print(
        f"a forward takes {server.fixed_seconds * 1e3:.2f} ms and {server.column_seconds * 1e3:.3f} ms for each node "
        f"of each text; a device is away for {load.away * 1e3:.1f} ms of each round",
        highlight=False,
    )
    console.print(table)
    console.print(
        f"the server emits no more from {saturates_at(server, load)} devices on; {most_sessions(server, load, least)} "
        f"get {least:g} tokens/s each",
        highlight=False,
    )
