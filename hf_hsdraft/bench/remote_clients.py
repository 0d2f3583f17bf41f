"""Devices for the bench `remote_sessions`: processes that each decode texts over a connection.

`python -m hf_hsdraft.bench.remote_clients` reads its orders as JSON from the standard input and writes one line of JSON
for each order. It loads the drafter once; each device is a fork of it, so many of them fit into memory.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..by_name import load_drafter
from ..drafters.ngrams.cacheback import CachebackDrafter
from ..remote.connecting import connect
from ..remote.remote_model import RemoteModel, RemoteOutput


@dataclass(frozen=True)
class Order:
    """What devices do.

    Attributes:
        url: of the server.
        drafter: `"ngrams"`, `"none"`, or a folder or Hub name.
        sessions: number of devices.
        prompts: token ids of prompts; device i begins with prompt i.
        texts: that each device decodes, one after the other.
        options: of `generate()`.
        most_taps: see `RemoteModel.generate`.
        soak_seconds: instead of `texts`, decodes for so long, while devices are killed at random.
    """

    url: str
    drafter: str
    sessions: int
    prompts: list[list[int]]
    texts: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    most_taps: int | None = None
    soak_seconds: float = 0.0


def drafter_named(name: str) -> Any:
    """Returns a drafter by its name in an order."""
    if name in ("none", "ngrams"):
        return None if name == "none" else CachebackDrafter()
    return load_drafter(name, torch.float32, "cpu")


def run(order: Order, drafter: Any) -> dict[str, Any]:
    """Runs an order; returns seconds from the first prompt to the last token, and what each text took."""
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(order.sessions + 1), context.SimpleQueue()
    model = _met(order, drafter)
    devices = [
        context.Process(target=_device, args=(order, drafter, model, place, ready, results), daemon=True)
        for place in range(order.sessions)
    ]
    for device in devices:
        device.start()
    ready.wait()
    began = time.monotonic()
    ended = [results.get() for _ in devices]
    for device in devices:
        device.join()
    failed = [each for each in ended if isinstance(each, str)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(devices)} devices failed: {failed[0]}")
    return {"seconds": time.monotonic() - began, "texts": [text for each in ended for text in each]}


def _met(order: Order, drafter: Any) -> RemoteModel:
    """The server as all devices know it: the rows of its target come over once, not once a device."""
    model = connect(order.url, patience=300.0, timeout=300.0)
    model.generate(order.prompts[0][:4], drafter, max_new_tokens=1)
    model.close()  # each device has connections of its own
    return model


def _device(order: Order, drafter: Any, model: RemoteModel, place: int, ready: Any, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        ready.wait()
        results.put([_decoded(order, drafter, model, place + order.sessions * turn) for turn in range(order.texts)])
    except Exception as error:
        ready.abort()
        results.put(f"{type(error).__name__}: {error}")


def _decoded(order: Order, drafter: Any, model: RemoteModel, number: int) -> dict[str, Any]:
    """Decodes one text; returns what it took."""
    which = number % len(order.prompts)
    output = model.generate(
        order.prompts[which],
        drafter,
        seed=which,
        most_taps=order.most_taps,
        return_dict_in_generate=True,
        **order.options,
    )
    assert isinstance(output, RemoteOutput)
    done = output.statistics
    return {
        "prompt": which,
        "tokens": output.sequences[0].tolist(),
        "new_tokens": done.new_tokens,
        "tau": done.tau,
        "nodes": sum(done.drafted_nodes),
        "rounds": len(output.link.batches),
        "seconds": done.total_seconds,
        "draft_seconds": done.draft_seconds,
        "verify_seconds": done.verify_seconds,
        **asdict(output.link),
    }


def soak(order: Order, drafter: Any) -> dict[str, Any]:
    """Decodes without end while devices are killed at random; a new device takes the place of each.

    Returns:
        number of texts that came out, of texts that came out wrong, and of kills.
    """
    context, rng, model = multiprocessing.get_context("fork"), random.Random(0), _met(order, drafter)
    first: dict[int, list[int]] = {}

    def started(place: int) -> tuple[Any, Any]:
        ours, its = context.Pipe(duplex=False)  # of its own: one that dies while it writes stops no other
        device = context.Process(target=_endless, args=(order, drafter, model, place, its), daemon=True)
        device.start()
        its.close()
        return device, ours

    devices = [started(place) for place in range(order.sessions)]
    done = wrong = kills = 0
    end = time.monotonic() + order.soak_seconds
    kill_at = time.monotonic() + 1.0
    while time.monotonic() < end:
        for which, tokens in (text for _, pipe in devices for text in _told(pipe)):
            wrong += first.setdefault(which, tokens) != tokens
            done += 1
        if time.monotonic() > kill_at:
            place = rng.randrange(order.sessions)
            _kill(*devices[place])
            devices[place], kills = started(place), kills + 1
            kill_at = time.monotonic() + rng.uniform(0.2, 2.0)
        time.sleep(0.05)
    for each in devices:
        _kill(*each)
    return {"texts": done, "wrong": wrong, "kills": kills, "first": first}


def _told(pipe: Any) -> Iterator[tuple[int, list[int]]]:
    """What a device has said since the last time: texts, each with the number of its prompt."""
    with contextlib.suppress(EOFError, OSError):  # it has ended
        while pipe.poll():
            which, tokens = json.loads(pipe.recv_bytes())
            yield which, tokens


def _kill(device: Any, pipe: Any) -> None:
    os.kill(device.pid, signal.SIGKILL)
    device.join()
    pipe.close()


def _endless(order: Order, drafter: Any, model: RemoteModel, place: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    number = place
    while True:
        text = _decoded(order, drafter, model, number)
        pipe.send_bytes(json.dumps([text["prompt"], text["tokens"]]).encode())
        number += order.sessions


def main(lines: Sequence[str] | Any = sys.stdin) -> None:
    """Reads orders and runs them, one after the other."""
    torch.set_num_threads(1)
    drafters: dict[str, Any] = {}
    for line in lines:
        order = Order(**json.loads(line))
        if order.drafter not in drafters:
            drafters[order.drafter] = drafter_named(order.drafter)
        work = soak if order.soak_seconds else run
        try:
            found = work(order, drafters[order.drafter])
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
