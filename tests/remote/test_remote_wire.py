"""Messages, sizes and plans: what comes in is checked before it is believed."""

from __future__ import annotations

import heapq
import random
import tracemalloc
from dataclasses import fields

import pytest
import torch

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

import msgpack
from fleet import DeviceLoad, ServerCosts, fleet_point, most_sessions, saturates_at
from oracles.remote_fuzz import fuzz, malformed
from remote_helpers import serving

from hf_hsdraft import DraftTree
from hf_hsdraft.remote.link import Address, LinkLost, ServerRefused
from hf_hsdraft.remote.messages import (
    TO_CLIENT,
    TO_SERVER,
    Accepted,
    Draft,
    Open,
    packed_ints,
    packed_states,
    packed_tree,
    unpacked_ints,
    unpacked_states,
    unpacked_tree,
)
from hf_hsdraft.remote.verify_server import VerifyServer
from hf_hsdraft.remote.wire import WireError, decode, encode


def test_messages_come_out_as_they_went_in() -> None:
    opening = Open(packed_ints([1, 2**31 - 1]), 2, 9, True, {"top_k": 5, "eos_token_id": [1, 2]}, [0, 3], 1)
    assert decode(encode(opening), TO_SERVER) == opening
    answer = Accepted(1, packed_ints([7]), 0, 3, 5, False, b"", 4, 0.25)
    assert decode(encode(answer), TO_CLIENT) == answer
    with pytest.raises(WireError):
        decode(encode(answer), TO_SERVER)
    assert not {kind.code for kind in TO_SERVER.values()} & {kind.code for kind in TO_CLIENT.values()}
    for kind in (*TO_SERVER.values(), *TO_CLIENT.values()):
        with pytest.raises(WireError, match=r"fields|type"):
            decode(msgpack.packb([kind.code, *[None] * (len(fields(kind)) or 1)]), {kind.code: kind})


def test_tokens_states_and_trees_are_packed_without_loss() -> None:
    assert unpacked_ints(packed_ints([0, 5, 2**31 - 1])) == [0, 5, 2**31 - 1]
    assert packed_ints([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    states = torch.randn(3, 8).bfloat16()
    assert torch.equal(unpacked_states(packed_states(states), 8), states)
    assert packed_states(torch.tensor([1.0])) == b"\x80\x3f"
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 2), (0, 1, 1, 2), (0.0, -1.0, -2.0, -3.0))
    found = unpacked_tree(packed_tree(3, tree), 9)
    assert (found.tokens, found.parents, found.depths) == (tree.tokens, tree.parents, tree.depths)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], []),
        ([5], [0]),
        ([5, 6], [-1]),
        ([5, 6], [-1, 1]),
        ([5, 6], [-1, -1]),
        ([5, 6, 6], [-1, 0, 0]),
        ([5, 97], [-1, 0]),
        ([5, -1], [-1, 0]),
        ([97, 5], [-1, 0]),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(WireError):
        unpacked_tree(Draft(1, packed_ints(tokens), packed_ints(parents, "h")), 97)


def test_thousands_of_malformed_messages_allocate_nothing_large() -> None:
    rng = random.Random(0)
    for _ in range(5_000):
        try:
            decode(malformed(rng), TO_SERVER)
        except WireError:
            continue
    messages = [malformed(rng) for _ in range(500)]
    tracemalloc.start()
    for each in messages:
        try:
            decode(each, TO_SERVER)
        except WireError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_fingerprint_that_is_a_path_is_refused(target) -> None:
    hello = VerifyServer(target)._hello
    assert decode(encode(hello), TO_CLIENT) == hello
    object.__setattr__(hello, "fingerprint", "../" * 20 + "abcd")
    with pytest.raises(WireError, match="fingerprint"):
        decode(encode(hello), TO_CLIENT)


def test_a_server_outlives_malformed_messages(target, own_tokenizer) -> None:
    with serving(target, own_tokenizer) as served, served.connect() as model:
        before = model.generate([5, 6, 7], max_new_tokens=20, do_sample=False)
        report = fuzz(Address.of(served.url), 400)
        assert {"malformed", "invalid", "size", "Tokens"} <= report.reactions.keys()
        assert not report.faults
        assert torch.equal(model.generate([5, 6, 7], max_new_tokens=20, do_sample=False), before)


def test_a_message_that_is_too_large_ends_its_connection(target) -> None:
    with serving(target, max_length=128) as served:
        link = served.link()
        with pytest.raises((LinkLost, ServerRefused), match=r"ended|larger"):
            link.send(Open(bytes(4 * 10**6), 1, 0, False, {}, [], 0))
            link.receive(*TO_CLIENT.values())
        assert served.link().hello.longest == 128


def simulated(server: ServerCosts, load: DeviceLoad, sessions: int, rounds: int = 400) -> float:
    """Tokens per second of devices and a server, event by event."""
    rng = random.Random(0)
    coming = [(rng.random() * load.away, device) for device in range(sessions)]
    heapq.heapify(coming)
    now, served = 0.0, 0
    while served < rounds * sessions:
        now = max(now, coming[0][0])
        batch = []
        while coming and coming[0][0] <= now and len(batch) < server.most_texts:
            batch.append(heapq.heappop(coming)[1])
        now += server.forward(len(batch), load.columns)
        served += len(batch)
        for device in batch:  # the way takes now a little more, now a little less
            heapq.heappush(coming, (now + load.away * rng.uniform(0.7, 1.3), device))
    return served * load.tokens / now


@pytest.mark.parametrize("sessions", [1, 3, 10, 40, 160])
@pytest.mark.parametrize("away", [0.0, 0.002, 0.02, 0.2])
def test_a_plan_is_what_a_simulation_gives(sessions: int, away: float) -> None:
    server = ServerCosts(0.02, 0.0005, 1000, 10**9, most_texts=16)
    load = DeviceLoad(tokens=2.5, columns=6, draft_seconds=away, sent=10, received=20)
    point = fleet_point(server, load, sessions)
    assert point.tokens_per_second == pytest.approx(simulated(server, load, sessions), rel=0.08)
    assert point.each_tokens_per_second * sessions == pytest.approx(point.tokens_per_second)
    assert point.sent == pytest.approx(point.tokens_per_second / 2.5 * 10)


def test_a_plan_knows_its_limits() -> None:
    server = ServerCosts(0.02, 0.0005, 1000, 10**9, most_texts=16)
    load = DeviceLoad(tokens=2.5, columns=6, draft_seconds=0.05, length=1000)
    most = saturates_at(server, load)
    full = fleet_point(server, load, 10 * most).tokens_per_second
    assert fleet_point(server, load, most).tokens_per_second == pytest.approx(full, rel=0.01)
    assert fleet_point(server, load, most // 2).tokens_per_second < 0.9 * full
    count = most_sessions(server, load, 20.0)
    assert fleet_point(server, load, count).each_tokens_per_second >= 20.0
    assert fleet_point(server, load, count + 1).each_tokens_per_second < 20.0
    assert most_sessions(server, load, 0.0) == 1000 and not fleet_point(server, load, 1001).fits
