"""Malformed messages for a server that verifies, and what becomes of them."""

from __future__ import annotations

import gc
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
from websockets.exceptions import ConnectionClosed

from hf_hsdraft.bench.calls import resident_bytes
from hf_hsdraft.remote.link import Address, Link, LinkLost, ServerRefused
from hf_hsdraft.remote.messages import (
    TO_CLIENT,
    Close,
    Decode,
    Draft,
    Encode,
    Message,
    Open,
    Resume,
    Rows,
    Taps,
    packed_ints,
)
from hf_hsdraft.remote.wire import WireError, decode, encode

_MOST_GROWTH = 64.0  # MiB

_VALID: tuple[Callable[[random.Random], Message], ...] = (
    lambda rng: Open(
        packed_ints([5] * rng.randint(1, 20)), 1, rng.getrandbits(40), False, {"max_new_tokens": 3}, [], 0
    ),
    lambda rng: Draft(rng.randint(1, 4), packed_ints([5, 6, 7]), packed_ints([-1, 0, 1], "h")),
    lambda rng: Resume("ab" * 16),
    lambda rng: Close(),
    lambda rng: Rows(rng.randint(0, 1), rng.getrandbits(20), rng.randint(1, 4000)),
    lambda rng: Encode("word " * rng.randint(0, 9), rng.random() < 0.5),
    lambda rng: Decode(packed_ints([rng.randint(-9, 99)])),
)
_HEADERS = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")  # list, map, bytes, text and extension of 32-bit lengths


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, 300))


def _flipped(rng: random.Random) -> bytes:
    data = bytearray(encode(rng.choice(_VALID)(rng)))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut(rng: random.Random) -> bytes:
    data = encode(rng.choice(_VALID)(rng))
    return data[: rng.randrange(len(data))] + _noise(rng)[: rng.randint(0, 3)]


def _huge(rng: random.Random) -> bytes:
    """A header that announces up to 4 billion items, or bytes, of which nothing comes."""
    size = rng.choice((2**32 - 1, 2**31, 2**24, 70_000))
    return b"\x94\x01" * rng.randint(0, 1) + rng.choice(_HEADERS) + struct.pack(">I", size) + _noise(rng)[:40]


def _nested(rng: random.Random) -> bytes:
    return rng.choice((b"\x91", b"\x81\x01")) * rng.randint(100, 30_000)


def _mistyped(rng: random.Random) -> bytes:
    """A message whose fields are of other types, out of range, too few or too many."""
    values = msgpack.unpackb(encode(rng.choice(_VALID)(rng)))
    numbers, texts = (-1, 2**63, float("nan"), float("inf"), 1e300), ("", "x" * 5000, b"", b"abc")
    odd: list[Any] = [None, True, *numbers, *texts, [], [[]], {}, {"a": {}}]
    for _ in range(rng.randint(1, 3)):
        values[rng.randrange(len(values))] = rng.choice(odd)
    return msgpack.packb(
        values[: rng.randint(0, len(values))] if rng.random() < 0.2 else values + [0] * (rng.random() < 0.1)
    )


def _other_way(rng: random.Random) -> bytes:
    """A message that only servers send."""
    return msgpack.packb([rng.choice(list(TO_CLIENT)), *([0] * rng.randint(0, 8))])


def _wrong_content(rng: random.Random) -> bytes:
    """A message of the right form that asks for what cannot be."""
    wrong = {"temperature": -1.0, "top_k": -5, "max_new_tokens": 2**62, "num_beams": 9, "eos_token_id": [2**40]}
    options: dict[str, Any] = rng.choice([{}, *({name: value} for name, value in wrong.items())])
    ids = packed_ints(rng.choice([[-1], [2**31 - 1], [5] * 4000, [5]]))
    taps = rng.choice([[], [60_000], list(range(60))])
    opening = Open(
        ids, rng.choice([1, 2, 2**20]), 0, False, options | {"do_sample": True}, taps, rng.choice([0, 2**20])
    )
    parents = [rng.randint(-2, 9) for _ in range(rng.randint(0, 200))]
    return encode(rng.choice([opening, Draft(rng.randint(1, 3), packed_ints([5] * 200), packed_ints(parents, "h"))]))


_KINDS = (_noise, _flipped, _cut, _huge, _nested, _mistyped, _other_way, _wrong_content)


def malformed(rng: random.Random) -> bytes:
    """Returns the bytes of a message that no device would send."""
    return rng.choice(_KINDS)(rng)


def _frame(rng: random.Random) -> bytes:
    """A WebSocket frame that announces more than it may."""
    size = rng.choice((2**62, 2**40, 2**31))
    return bytes([0x80 | rng.choice((0x1, 0x2, 0x9)), 0xFF]) + struct.pack(">Q", size) + rng.randbytes(4)


@dataclass
class FuzzReport:
    """What became of malformed messages."""

    messages: int  # sent
    reactions: Counter[str]  # times of each: answers, reasons of refusals, codes of connections that ended
    seconds: float  # in all
    grown_mebibytes: float  # of this process's memory, after the first tenth of the messages

    @property
    def faults(self) -> list[str]:
        """What a server should not have done."""
        found = [name for name in ("failed", "fault", "no answer") if self.reactions[name]]
        return found + ([] if self.grown_mebibytes < _MOST_GROWTH else [f"{self.grown_mebibytes:.0f} MiB of growth"])


def fuzz(address: Address, messages: int, seed: int = 0) -> FuzzReport:
    """Sends so many malformed messages to a server on this machine, on new connections where it ends one."""
    rng, reactions, before = random.Random(seed), Counter[str](), 0.0
    began = time.monotonic()
    link: Link | None = None
    for number in range(messages):
        if number == messages // 10:
            before = _mebibytes()
        if link is None or not link.is_open:
            link = Link(address)
        reaction = _reaction(link, rng)
        reactions[reaction] += 1
        if reaction == "malformed" or reaction.startswith("closed"):
            link.close()
    if link is not None:
        link.close()
    gc.collect()
    return FuzzReport(messages, reactions, time.monotonic() - began, _mebibytes() - before)


def _mebibytes() -> float:
    return (resident_bytes() or 0) / 2**20


def _reaction(link: Link, rng: random.Random) -> str:
    try:
        if rng.random() < 0.02:
            link._socket.socket.sendall(_frame(rng))
        elif rng.random() < 0.02:
            link._socket.send("text")
        else:
            data = malformed(rng)
            link._socket.send(data)
            if _has_no_answer(data):
                return "no answer is due"
        answer: Message = link.receive(*TO_CLIENT.values())
        while isinstance(answer, Taps):  # comes before the answer
            answer = link.receive(*TO_CLIENT.values())
        return type(answer).__name__
    except ServerRefused as refusal:
        return refusal.reason
    except LinkLost as lost:
        return "no answer" if "said nothing" in str(lost) else f"closed {lost.code}"
    except ConnectionClosed as closed:
        return f"closed {closed.rcvd.code if closed.rcvd else None}"
    except (OSError, WireError) as error:
        return f"closed by {type(error).__name__}"


def _has_no_answer(data: bytes) -> bool:
    try:
        return isinstance(decode(data, {Close.code: Close}), Close)
    except WireError:
        return False
