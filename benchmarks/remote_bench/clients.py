"""Devices for the bench `remote_sessions`: processes that each decode texts over a connection.

`python benchmarks/remote_bench/clients.py` reads its orders as JSON from the standard input and writes one line of JSON
for each order. It loads the drafter once; each device is a fork of it, so many of them fit into memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

import torch

from hf_hsdraft.drafters.lookup.cacheback import CachebackDrafter
from hf_hsdraft.generate.by_name import load_drafter
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.remote_model import RemoteModel, RemoteOutput


@dataclass(frozen=True)
class Order:
    """What devices do."""

    url: str  # of the server
    drafter: str  # `"ngrams"`, `"none"`, or a folder or Hub name
    sessions: int  # number of devices
    prompts: list[list[int]]  # token ids of prompts; device i begins with prompt i
    texts: int = 1  # that each device decodes, one after the other
    options: dict[str, Any] = field(default_factory=dict)  # of `generate()`
    most_taps: int | None = None  # see `RemoteModel.generate`
    soak_seconds: float = 0.0  # instead of `texts`, decodes for so long, while devices are killed at random
    timeout_seconds: float = 900.0  # after which an order that has not ended fails
    stuck_seconds: float = 60.0  # after which a device that gets no tokens counts as stuck

    @classmethod
    def of(cls, asked: argparse.Namespace, port: int, drafter: str, count: int, prompts: list[list[int]]) -> Order:
        """Returns what devices do for a row, or for a soak, by the command's arguments."""
        url, soak_seconds = f"http://127.0.0.1:{port}", asked.soak_minutes * 60
        limits = asked.most_taps, soak_seconds, asked.timeout_seconds, asked.stuck_seconds
        return cls(url, drafter, count, prompts, asked.texts, options_of(asked), *limits)


def options_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `generate()` that the command's arguments ask for."""
    return {"max_new_tokens": asked.max_new_tokens, "do_sample": asked.sample}


class Beats:
    """A streamer that notes when tokens come; calls `first` at the first token, and `each` whenever any come.

    `beats` are the time of each round on the machine's clock, which all processes share, and its number of tokens.
    """

    def __init__(self, first: Callable[[], object] = lambda: None, each: Callable[[], object] = lambda: None) -> None:
        self._first, self._each, self._prompt = first, each, True
        self.beats: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.beats.append((time.monotonic(), value.numel()))
        self._each()
        if len(self.beats) == 1:
            self._first()

    def end(self) -> None:
        """The text has ended."""


@dataclass
class _Device:
    """A process that decodes."""

    process: Any
    pipe: Any  # what it tells, as lists in JSON. Each has its own: one that dies while it writes stops no other
    told: float = field(default_factory=time.monotonic)  # when it last told something

    @classmethod
    def of(cls, work: Callable[..., None], *arguments: Any) -> _Device:
        context = multiprocessing.get_context("fork")
        ours, its = context.Pipe(duplex=False)
        process = context.Process(target=_working, args=(work, its, *arguments), daemon=True)
        process.start()
        its.close()
        return cls(process, ours)

    def news(self) -> Iterator[list[Any]]:
        """What it has told since the last time. The last thing that a device tells is `["ended", why]`."""
        try:
            while self.pipe.poll():
                self.told = time.monotonic()
                yield json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            yield ["ended", "the process has died"]

    def kill(self) -> None:
        """Ends it in the middle of what it does."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _working(work: Callable[..., None], pipe: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)

    def tell(*what: Any) -> None:
        pipe.send_bytes(json.dumps(what).encode())

    try:
        work(tell, *arguments)
        tell("ended", "")
    except Exception as error:
        tell("ended", f"{type(error).__name__}: {error}")


def run(order: Order, drafter: Any) -> dict[str, Any]:
    """Runs an order; returns seconds from the first prompt to the last token, and what each text took.

    Raises a RuntimeError if a device has failed, a TimeoutError if the order has taken too long.
    """
    together, model = multiprocessing.get_context("fork").Barrier(order.sessions), _met(order, drafter)
    places = range(order.sessions)
    devices = [_Device.of(_few, order, drafter, model, place, together) for place in places]
    end, texts, faults = time.monotonic() + order.timeout_seconds, list[dict[str, Any]](), list[str]()
    working = {device.pipe: device for device in devices}
    try:
        while working and time.monotonic() < end:
            for pipe in wait(list(working), 1.0):
                for kind, what in working[pipe].news():
                    if kind == "text":
                        texts.append(what)
                        continue
                    working.pop(pipe, None)
                    faults += [what] if what else []
                    break
    finally:
        for each in devices:
            each.kill()
    if faults:
        first = min(faults, key=lambda fault: fault.startswith("BrokenBarrier"))  # these only follow from another one
        raise RuntimeError(f"{len(faults)} of {len(devices)} devices failed: {first}")
    if working:
        raise TimeoutError(f"{len(working)} of {len(devices)} devices have not ended in {order.timeout_seconds:g} s")
    seconds = max(text["beats"][-1][0] for text in texts) - min(text["began"] for text in texts)
    return {"seconds": seconds, "texts": texts}


def _met(order: Order, drafter: Any) -> RemoteModel:
    """The server as all devices know it: the rows of its target come over once, not once a device."""
    model = connect(order.url, patience=300.0, timeout=300.0)
    model.generate(order.prompts[0][:4], drafter, max_new_tokens=1)
    model.close()  # each device has its own connections
    return model


def _few(tell: Callable[..., None], order: Order, drafter: Any, model: RemoteModel, place: int, together: Any) -> None:
    """Decodes the texts of a device. All devices begin together, and go on together after the first token."""
    try:
        together.wait(order.timeout_seconds)
        for turn in range(order.texts):
            # A server that decodes without devices does not wait.
            meets = turn == 0 and drafter is not None
            beats = Beats(lambda: together.wait(order.timeout_seconds)) if meets else Beats()
            tell("text", _decoded(order, drafter, model, place + order.sessions * turn, beats) | {"turn": turn})
    except Exception:
        together.abort()
        raise


def _decoded(order: Order, drafter: Any, model: RemoteModel, number: int, beats: Beats) -> dict[str, Any]:
    """Decodes one text; returns what it took."""
    which, began = number % len(order.prompts), time.monotonic()
    output = model.generate(
        order.prompts[which],
        drafter,
        seed=which,
        most_taps=order.most_taps,
        streamer=beats,
        return_dict_in_generate=True,
        **order.options,
    )
    assert isinstance(output, RemoteOutput)
    done = output.statistics
    return {
        "prompt": which,
        "tokens": output.sequences[0].tolist(),
        "new_tokens": done.new_tokens,
        "nodes": sum(done.drafted_nodes),
        "rounds": len(output.link.batches),
        "began": began,
        "beats": beats.beats,
        "draft_seconds": done.draft_seconds,
        "verify_seconds": done.verify_seconds,
        **asdict(output.link),
    }


def soak(order: Order, drafter: Any) -> dict[str, Any]:
    """Decodes without end while devices are killed at random; a new device takes the place of each that ends.

    Returns the numbers of texts, of texts that came out otherwise than before, of kills, of devices that got no tokens
    for too long, and of failures by what they say; and the first text of each prompt.
    """
    rng, model = random.Random(0), _met(order, drafter)
    first, failures = dict[int, list[int]](), Counter[str]()

    def started(place: int) -> _Device:
        return _Device.of(_endless, order, drafter, model, place)

    devices = [started(place) for place in range(order.sessions)]
    done = wrong = kills = stuck = 0
    end, kill_at = time.monotonic() + order.soak_seconds, time.monotonic() + 1.0
    try:
        while time.monotonic() < end and failures.total() < 10 * order.sessions:
            for place, device in enumerate(devices):
                ended = ""
                for kind, *what in device.news():
                    if kind == "text":
                        wrong += first.setdefault(what[0], what[1]) != what[1]
                        done += 1
                    elif kind == "ended":
                        ended = what[0]
                        break
                failures[ended] += bool(ended)
                is_stuck = time.monotonic() - device.told > order.stuck_seconds
                stuck += is_stuck
                if ended or is_stuck:
                    device.kill()
                    devices[place] = started(place)
            if time.monotonic() > kill_at:
                place = rng.randrange(order.sessions)
                devices[place].kill()
                devices[place], kills = started(place), kills + 1
                kill_at = time.monotonic() + rng.uniform(0.2, 2.0)
            time.sleep(0.05)
    finally:
        for each in devices:
            each.kill()
    counted = {"texts": done, "wrong": wrong, "kills": kills, "stuck": stuck}
    return counted | {"failures": dict(+failures), "first": first}


def _endless(tell: Callable[..., None], order: Order, drafter: Any, model: RemoteModel, place: int) -> None:
    number = place
    while True:
        text = _decoded(order, drafter, model, number, Beats(each=lambda: tell("going")))
        tell("text", text["prompt"], text["tokens"])
        number += order.sessions


def main(lines: Sequence[str] | Any = sys.stdin) -> int:
    """Reads orders and runs them, one after the other; returns 1 if one has failed."""
    torch.set_num_threads(1)
    drafters: dict[str, Any] = {"none": None, "ngrams": CachebackDrafter()}
    failed = 0
    for line in lines:
        order = Order(**json.loads(line))
        try:
            if order.drafter not in drafters:
                drafters[order.drafter] = load_drafter(order.drafter, torch.float32, "cpu")
            found = (soak if order.soak_seconds else run)(order, drafters[order.drafter])
        except Exception as error:
            found, failed = {"error": f"{type(error).__name__}: {error}"}, 1
        print(json.dumps(found), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
