"""Running servers as devices reach them, and what plain decoding makes of the same prompts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from conftest import VOCAB
from oracles.remote_server import in_background

from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.link import Address, Link, LinkLost
from hf_hsdraft.remote.messages import Open, Opened, packed_ints
from hf_hsdraft.remote.remote_model import RemoteModel
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.verify_server import VerifyServer


class Serving:
    """A running server as devices reach it."""

    def __init__(self, server: VerifyServer, port: int) -> None:
        self.server, self.port, self.url = server, port, f"http://127.0.0.1:{port}"
        self.sessions, self.status = server.sessions, server.status

    def connect(self, token: str = "", **how: Any) -> RemoteModel:
        return connect(self.url, token, **how)

    def link(self) -> Link:
        return Link(Address.of(self.url))

    def opened(self, ids: torch.Tensor, link: Link | None = None, **options: Any) -> tuple[Link, Opened]:
        """Opens a text of tokens `[1, n]`."""
        link = link or self.link()
        return link, link.ask(opening(ids, **options), Opened)


def opening(ids: torch.Tensor, taps: tuple[int, ...] = (), prompt: int | None = None, **options: Any) -> Open:
    """The message that opens a text of tokens `[1, n]`, of which the first `prompt` are the prompt; by default all."""
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    return Open(packed_ints(ids[0].tolist()), prompt or ids.shape[1], 7, False, options, list(taps), 0)


@contextlib.contextmanager
def serving(
    target: Any, *further: Any, port: int = 0, tls: Any = None, token: str = "", packed: bool = False, **limits: Any
) -> Iterator[Serving]:
    """Runs a server of a target, `further` a tokenizer and a name."""
    server = VerifyServer(
        target, *further, limits=ServerLimits(**{"max_length": 256, **limits}), token=token, packed_weights=packed
    )
    with in_background(server, port, tls) as port:
        yield Serving(server, port)


class Streamer:
    """Notes what is put; calls `then` with the number of each round."""

    def __init__(self, then: Callable[[int], Any] = lambda rounds: None) -> None:
        self.tokens: list[int] = []
        self.rounds, self.ended, self._then = 0, False, then

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.rounds += 1
        self._then(self.rounds)

    def end(self) -> None:
        self.ended = True


def fail_once(monkeypatch: Any, number: int, error: BaseException) -> None:
    """Lets a device fail at a message of the server, counted from now on; a lost connection is closed."""
    receive, told = Link.receive, []

    def failing(self: Link, *kinds: Any) -> Any:
        told.append(kinds)
        if len(told) != number:
            return receive(self, *kinds)
        if isinstance(error, LinkLost):
            self.close()
        raise error

    monkeypatch.setattr(Link, "receive", failing)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def prompts(count: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (1, length), generator=generator) for length in lengths]


def plain(target: Any, ids: torch.Tensor, seed: int = 0, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return target.generate(ids, attention_mask=torch.ones_like(ids), **options)


def at_once(decode: Callable[[int], Any], count: int) -> list[Any]:
    """Runs a function on as many threads, with the number of each."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(decode, range(count)))
