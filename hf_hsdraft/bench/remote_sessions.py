"""Many devices and one server that verifies: `python -m hf_hsdraft.bench.remote_sessions --out sessions.json`.

A server runs in a process of its own, and each device in another one. Between them is a relay that adds latency and
limits bandwidth. Each way of drafting is compared with the server decoding plainly for the same devices, and each text
with plain `generate()`. `--soak-minutes 10` lets devices decode without end while they are killed at random.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..remote.fleet import DeviceLoad, fleet_point
from ..remote.fleet_report import costs_of_status
from ..target.target_loading import load_target
from .default_prompts import DEFAULT_PROMPTS
from .remote_clients import Order
from .remote_relay import relay

console = Console(width=150)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--target", default=None, help="Hub name or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafters", default="none,ngrams", help="none (the server alone), ngrams, folders, Hub names")
    parser.add_argument("--sessions", default="1,4,16,64")
    parser.add_argument("--round-trip-ms", default="0,20,80")
    parser.add_argument("--mbit", default="", help="of each connection; empty for no limit")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--texts", type=int, default=1, help="of each device")
    parser.add_argument("--most-taps", type=int, default=None, help="positions of the prompt whose taps are fetched")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--wait-ms", type=float, default=2.0)
    parser.add_argument("--packed", action="store_true", help="the server packs its weights")
    parser.add_argument("--sample", action="store_true", help="draw tokens; else greedy")
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path("remote_sessions.json"))
    return parser.parse_args()


def plain_texts(asked: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the token ids of the prompts, and of the texts that plain `generate()` makes of them."""
    import torch

    target, tokenizer = load_target(asked.target, torch.float32, "cpu")
    prompts, texts = [], []
    for seed, prompt in enumerate(DEFAULT_PROMPTS):
        turns = [{"role": "user", "content": prompt.turns[0]}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        torch.manual_seed(seed)
        output = target.generate(**ids, **options_of(asked))
        prompts.append(ids["input_ids"][0].tolist())
        texts.append(output[0].tolist())
    return prompts, texts


def options_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `generate()`."""
    return {"max_new_tokens": asked.max_new_tokens, "do_sample": asked.sample}


@contextlib.contextmanager
def served(asked: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Runs a server in a process of its own; gives its port and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_hsdraft.cli", "verify-server", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-sessions", "128", "--max-batch", str(asked.max_batch), "--wait-ms", str(asked.wait_ms)]
    command += ["--max-length", "2048", "--keep-seconds", "5"]
    command += ["--target", asked.target] if asked.target else []
    command += ["--packed"] if asked.packed else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                status_of(port)
                break
            time.sleep(0.3)
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with status {process.returncode}")
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def status_of(port: int) -> dict[str, Any]:
    """Returns what a server says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as answer:
        return json.load(answer)


class Devices:
    """The process that forks devices."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "hf_hsdraft.bench.remote_clients"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, order: Order) -> dict[str, Any]:
        """Runs an order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asdict(order)), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline())
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measured(
    found: dict[str, Any], before: dict[str, Any], after: dict[str, Any], texts: Sequence[Any]
) -> dict[str, Any]:
    """Returns the figures of an order, from what it returned and from what the server said before and after it."""
    done = found["texts"]
    rounds = max(sum(each["rounds"] for each in done), 1)
    sizes = {int(size): count for size, count in after["batches"]["sizes"].items()}
    for size, count in before["batches"]["sizes"].items():
        sizes[int(size)] -= count
    forwards = max(sum(sizes.values()), 1)
    return {
        "tokens_per_second": sum(each["new_tokens"] for each in done) / found["seconds"],
        "each": statistics.median(each["new_tokens"] / each["seconds"] for each in done),
        "slowest": min(each["new_tokens"] / each["seconds"] for each in done),
        "tau": sum(each["new_tokens"] for each in done) / (rounds + len(done)),
        "nodes": sum(each["nodes"] for each in done) / rounds,
        "draft_seconds": sum(each["draft_seconds"] for each in done) / rounds,
        "sent": sum(each["sent"] for each in done) / rounds,
        "received": sum(each["received"] - each["prompt_received"] for each in done) / rounds,
        "prompt_received": sum(each["prompt_received"] for each in done) / len(done),
        "batch": sum(size * count for size, count in sizes.items()) / forwards,
        "largest_batch": max((size for size, count in sizes.items() if count), default=0),
        "same": sum(each["tokens"] == texts[each["prompt"]] for each in done),
        "texts": len(done),
        "seconds": found["seconds"],
    }


def sweep(
    asked: argparse.Namespace, prompts: list[list[int]], texts: list[list[int]], port: int
) -> list[dict[str, Any]]:
    """Runs all combinations of drafter, devices, latency and bandwidth; prints a row for each."""
    rows, devices = [], Devices()
    links = [
        (float(ms), float(mbit) if mbit else math.inf)
        for ms in asked.round_trip_ms.split(",")
        for mbit in asked.mbit.split(",")
    ]
    for milliseconds, mbit in links:
        with relay(port, milliseconds / 1e3, mbit * 125_000) as there:
            for drafter in asked.drafters.split(","):
                for count in map(int, asked.sessions.split(",")):
                    order = Order(
                        f"http://127.0.0.1:{there}",
                        drafter,
                        count,
                        prompts,
                        asked.texts,
                        options_of(asked),
                        asked.most_taps,
                    )
                    before = status_of(port)
                    found = devices.run(order)
                    after = status_of(port)
                    row = {
                        "drafter": Path(drafter).name,
                        "sessions": count,
                        "round_trip_ms": milliseconds,
                        "mbit": None if math.isinf(mbit) else mbit,
                    }
                    rows.append(row | measured(found, before, after, texts))
                    console.print(f"{json.dumps(rows[-1])}", highlight=False, soft_wrap=True)
    devices.close()
    return rows


def print_rows(rows: Sequence[dict[str, Any]], status: dict[str, Any]) -> None:
    """Prints the figures, beside what the plan of a fleet gives for the same case."""
    table = Table(
        "drafter",
        "devices",
        "ms",
        "Mbit/s",
        "tokens/s",
        "plan",
        "each",
        "tau",
        "nodes",
        "batch",
        "most",
        "B sent",
        "B got",
        "B prompt",
        "same",
    )
    server = costs_of_status(status)
    for row in rows:
        load = DeviceLoad(
            row["tau"],
            row["nodes"] + 1,
            row["draft_seconds"],
            row["sent"],
            row["received"],
            row["round_trip_ms"] / 1e3,
            (row["mbit"] or math.inf) * 125_000,
        )
        if row["drafter"] == "none":
            load = DeviceLoad()
        plan = fleet_point(server, load, row["sessions"]).tokens_per_second
        figures = [row["tokens_per_second"], plan, row["each"], row["tau"], row["nodes"], row["batch"]]
        sizes = [row["largest_batch"], row["sent"], row["received"], row["prompt_received"]]
        limit = "" if row["mbit"] is None else f"{row['mbit']:g}"
        table.add_row(
            row["drafter"],
            str(row["sessions"]),
            f"{row['round_trip_ms']:g}",
            limit,
            *(f"{each:.2f}" for each in figures),
            *(f"{each:.0f}" for each in sizes),
            f"{row['same']}/{row['texts']}",
        )
    console.print(table)
    line = f"a forward takes {server.fixed_seconds * 1e3:.1f} ms and {server.column_seconds * 1e3:.2f} ms for each node"
    console.print(f"{line} of each text; a token keeps {server.token_bytes} bytes", highlight=False)


def resident_mebibytes(pid: int) -> float:
    """Returns the memory that a process holds, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soaked(
    asked: argparse.Namespace, prompts: list[list[int]], texts: list[list[int]], port: int, pid: int
) -> dict[str, Any]:
    """Lets devices decode while they are killed; watches the server's memory and texts that no longer move."""
    devices, memory, found = Devices(), [], {}
    count, seconds = max(map(int, asked.sessions.split(","))), asked.soak_minutes * 60
    drafter = asked.drafters.split(",")[-1]
    order = Order(f"http://127.0.0.1:{port}", drafter, count, prompts, 1, options_of(asked), asked.most_taps, seconds)
    working = threading.Thread(target=lambda: found.update(devices.run(order)))
    working.start()
    began, stuck, last = time.monotonic(), 0, -1
    while working.is_alive():
        working.join(10.0)
        status = status_of(port)
        stuck += status["attached"] > 0 and status["batches"]["tokens"] == last
        last = status["batches"]["tokens"]
        memory.append(resident_mebibytes(pid))
        console.print(
            f"{time.monotonic() - began:6.0f} s  {memory[-1]:7.1f} MiB  {status['sessions']:3} texts  "
            f"{status['attached']:3} attached  {status['lost']:4} lost  {last:7} tokens",
            highlight=False,
        )
    devices.close()
    time.sleep(7.0)  # longer than texts are kept
    status, wrong = status_of(port), sum(tokens != texts[int(which)] for which, tokens in found["first"].items())
    third = max(len(memory) // 3, 1)
    return {
        "texts": found["texts"],
        "kills": found["kills"],
        "wrong": found["wrong"] + wrong,
        "standstills": stuck,
        "left_sessions": status["sessions"],
        "left_connections": status["connections"],
        "first_third_mebibytes": max(memory[:third]),
        "last_third_mebibytes": max(memory[-third:]),
    }


def main() -> None:
    """The command."""
    asked = _arguments()
    prompts, texts = plain_texts(asked)
    with served(asked) as (port, pid):
        if asked.soak_minutes:
            result: dict[str, Any] = {"soak": soaked(asked, prompts, texts, port, pid)}
            console.print(result["soak"])
        else:
            rows = sweep(asked, prompts, texts, port)
            result = {"rows": rows}
            print_rows(rows, status_of(port))
        result["status"] = status_of(port)
    partial = asked.out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(asked.out)


if __name__ == "__main__":
    main()
