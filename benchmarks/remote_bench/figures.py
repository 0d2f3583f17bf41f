"""The figures of the bench `remote_sessions`, beside the plan of a fleet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from fleet import DeviceLoad, ServerCosts, costs_of_status, fleet_point
from runner import print_table


def together(texts: Sequence[dict[str, Any]]) -> float | None:
    """Returns the tokens per second of all devices while all decoded their first text; `None` if they never did.

    Connecting, prompts and the time after the first device is done are left out.
    """
    first = [text["beats"] for text in texts if text["turn"] == 0]
    begin, end = max(beats[0][0] for beats in first), min(beats[-1][0] for beats in first)
    if end <= begin:
        return None
    return sum(count for beats in first for at, count in beats[1:] if begin < at <= end) / (end - begin)


def measured(
    found: dict[str, Any], before: dict[str, Any], after: dict[str, Any], texts: Sequence[Any], plain: bool
) -> dict[str, Any]:
    """Returns the figures of an order, from what it returned and from what the server said before and after it.

    `texts` are those of plain `generate()`. A `plain` server decodes by itself, and waits for no device: its forwards
    alone are its time.
    """
    done, old, now = found["texts"], before["batches"], after["batches"]
    rounds = max(sum(each["rounds"] for each in done), 1)
    sizes = {int(size): count - old["sizes"].get(size, 0) for size, count in now["sizes"].items()}
    forwards, read = max(sum(sizes.values()), 1), max(sum(size * count for size, count in sizes.items()), 1)
    verified = (now["tokens"] - old["tokens"]) / max(now["verify_seconds"] - old["verify_seconds"], 1e-9)
    rates = [(each["new_tokens"] - 1) / max(each["beats"][-1][0] - each["beats"][0][0], 1e-9) for each in done]
    return {
        "tokens_per_second": sum(each["new_tokens"] for each in done) / found["seconds"],
        "decode_tokens_per_second": verified if plain else together(done),
        "each": statistics.median(rates),
        "slowest": min(rates),
        "tau": sum(each["new_tokens"] - 1 for each in done) / rounds,
        "nodes": sum(each["nodes"] for each in done) / rounds,
        "columns": (now["columns"] - old["columns"]) / read,
        "draft_seconds": sum(each["draft_seconds"] for each in done) / rounds,
        "sent": sum(each["sent"] for each in done) / rounds,
        "received": sum(each["received"] - each["prompt_received"] for each in done) / rounds,
        "prompt_received": sum(each["prompt_received"] for each in done) / len(done),
        "batch": read / forwards,
        "largest_batch": max((size for size, count in sizes.items() if count), default=0),
        "same": sum(each["tokens"] == texts[each["prompt"]] for each in done),
        "texts": len(done),
        "seconds": found["seconds"],
    }


_COLUMNS = (
    "drafter", "devices", "ms", "Mbit/s", "tokens/s", "decoding", "plan", "each", "tau", "nodes", "columns", "batch",
    "most", "B sent", "B got", "B prompt", "same",
)  # fmt: skip


def print_rows(rows: Sequence[dict[str, Any]], status: dict[str, Any]) -> None:
    """Prints the figures, beside what the plan of a fleet gives for the same case."""
    server = costs_of_status(status)
    print_table(_COLUMNS, (_cells(row, server) for row in rows if "error" not in row))
    line = f"a forward takes {server.fixed_seconds * 1e3:.1f} ms and {server.column_seconds * 1e3:.2f} ms for each node"
    print(f"{line} of each text; a token keeps {server.token_bytes} bytes")


def _cells(row: dict[str, Any], server: ServerCosts) -> list[Any]:
    plan = None
    if row["drafter"] != "generate":
        way = row["round_trip_ms"] / 1e3, (row["mbit"] or math.inf) * 125_000
        load = DeviceLoad(row["tau"], row["columns"], row["draft_seconds"], row["sent"], row["received"], *way)
        load = DeviceLoad() if row["drafter"] == "none" else load
        plan = fleet_point(server, load, row["sessions"]).tokens_per_second
    cells = [row["drafter"], row["sessions"], f"{row['round_trip_ms']:g}", row["mbit"] and f"{row['mbit']:g}"]
    cells += [row["tokens_per_second"], row["decode_tokens_per_second"], plan, row["each"]]
    cells += [row.get(name) for name in ("tau", "nodes", "columns", "batch")]
    sizes = (row.get(name) for name in ("largest_batch", "sent", "received", "prompt_received"))
    cells += [size if size is None else f"{size:.0f}" for size in sizes]
    return [*cells, None if row["same"] is None else f"{row['same']}/{row['texts']}"]


def faults_of(result: dict[str, Any]) -> list[str]:
    """Returns what has gone wrong, by what was written."""
    faults = [
        f"{row['drafter']}, {row['sessions']} devices: {row['error']}"
        for row in result.get("rows", ())
        if "error" in row
    ]
    for row in result.get("rows", ()):
        if row.get("same") is not None and row["same"] != row["texts"]:
            faults.append(f"{row['drafter']}, {row['sessions']} devices: {row['texts'] - row['same']} texts are others")
    soak = result.get("soak")
    if soak is not None:
        names = "wrong", "stuck", "failures", "server_failures", "left_sessions", "left_connections", "left_bytes"
        faults += [f"{name}: {soak[name]}" for name in names if soak[name]]
        if not soak["texts"]:
            faults.append("no text came out")
        if soak["last_third_mebibytes"] > 1.1 * soak["first_third_mebibytes"]:
            faults.append("the server's memory has grown by more than a tenth")
    return faults
