"""What a server takes on is bounded: messages, queues, memory, columns, time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.remote_server import connected, in_background
from oracles.scripted import ScriptedDrafter
from test_remote import plain, prompts, until
from test_remote_faults import address, opened

from hf_hsdraft import CachebackDrafter, DraftTree
from hf_hsdraft.remote.batch_timing import BatchStatistics
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.desk import Conversation, DeviceGone
from hf_hsdraft.remote.link import Link, LinkLost, ServerRefused
from hf_hsdraft.remote.messages import (
    Accepted,
    Decode,
    Open,
    Opened,
    RowData,
    Rows,
    Taps,
    Text,
    packed_ints,
    packed_tree,
    unpacked_states,
)
from hf_hsdraft.remote.sessions import Overloaded, ServerLimits, Sessions
from hf_hsdraft.remote.verify_server import VerifyServer

LIMITS = ServerLimits(max_length=256, piece=8)
SAID = "what a device has said"


def opening(length: int, taps=(), **options) -> Open:
    options = {"max_new_tokens": 9, "do_sample": False, **options}
    return Open(packed_ints([5, 6, 7, 8] * (length // 4)), length, 0, False, options, list(taps), 0)


@pytest.fixture
def server(target):
    server = VerifyServer(target, limits=LIMITS)
    yield server
    server.close()


def test_hidden_states_come_in_pieces_that_fit_a_message(target, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    monkeypatch.setattr("hf_hsdraft.remote.desk.PIECE_BYTES", 302)  # ends within positions
    monkeypatch.setattr("hf_hsdraft.remote.verified_text.PIECE_BYTES", 302)
    ids, layers = prompts(1, seed=51)[0].repeat(1, 2), [1, 3]
    states = target(ids, output_hidden_states=True).hidden_states
    with connected(VerifyServer(target, limits=LIMITS)) as model:
        link, got = model._links.take(), []
        link.send(Open(packed_ints(ids[0].tolist()), ids.shape[1], 0, False, {"max_new_tokens": 9}, layers, 0))
        while isinstance(reply := link.receive(Taps, Opened), Taps):
            got.append(reply.states)
        assert max(map(len, got)) == 302 and reply.reach == 302 // (2 * 2 * 32) - 1
        expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(unpacked_states(b"".join(got), 64).float(), expected, atol=0.03, rtol=0.02)
        found = model.generate(ids, make_drafter(target), max_new_tokens=20, do_sample=False)
        assert torch.equal(found, plain(target, ids, max_new_tokens=20, do_sample=False))
        monkeypatch.setattr("hf_hsdraft.remote.verified_text.PIECE_BYTES", 100)
        with pytest.raises(ServerRefused, match="do not fit"):
            link.ask(opening(4, layers), Opened)


def test_nothing_more_is_read_for_a_device_that_does_not_read(server) -> None:
    async def run() -> None:
        reads, sent = asyncio.Event(), []

        async def send(message) -> None:
            sent.append(message)
            await reads.wait()

        task = asyncio.create_task(Conversation(server._desk, send, lambda: True).answer(opening(40, [1])))
        await asyncio.sleep(0.5)
        assert server.status()["batches"]["prompt_tokens"] == 8 and len(sent) == 1
        reads.set()
        await task
        assert server.status()["batches"]["prompt_tokens"] == 40
        assert [type(each) for each in sent] == [Taps] * 5 + [Opened]

    asyncio.run(run())


def test_a_short_prompt_does_not_wait_for_a_long_one(server) -> None:
    async def run() -> None:
        order = []

        def talk(name: str) -> Conversation:
            async def send(message) -> None:
                order.append((name, server.status()["batches"]["prompt_tokens"]))

            return Conversation(server._desk, send, lambda: True)

        long = asyncio.create_task(talk("long").answer(opening(200)))
        while not server.status()["batches"]["prompt_tokens"]:
            await asyncio.sleep(0)
        await talk("short").answer(opening(8))
        await long
        assert [name for name, _ in order] == ["short", "long"] and order[0][1] < 200

    asyncio.run(run())


def test_a_prompt_is_not_read_on_for_a_device_that_is_gone(server) -> None:
    async def run() -> None:
        is_open = iter([True, False])

        async def send(message) -> None:
            raise AssertionError("nobody is there")

        with pytest.raises(DeviceGone):
            await Conversation(server._desk, send, lambda: next(is_open)).answer(opening(200))
        assert server.status()["batches"]["prompt_tokens"] == 8 and len(server.sessions) == 0

    asyncio.run(run())


def test_forwards_have_no_more_columns_than_allowed(target, monkeypatch) -> None:
    limits = ServerLimits(max_length=256, max_columns=12, max_nodes=11, wait_seconds=0.1)
    server, ids, seen = VerifyServer(target, limits=limits), prompts(4, seed=61), []
    expected = [plain(target, one, max_new_tokens=30, do_sample=False) for one in ids]
    read = server._reader.read

    def watched(caches, trees, taps):
        seen.append((len(trees), max(map(len, trees))))
        return read(caches, trees, taps)

    monkeypatch.setattr(server._reader, "read", watched)
    monkeypatch.setattr("hf_hsdraft.remote.desk.Conversation._most_nodes", lambda self, texts: 11)  # nobody is told
    drafter = ScriptedDrafter(make_drafter(target), [one[0].tolist() for one in expected])
    with (
        in_background(server) as port,
        connect(f"http://127.0.0.1:{port}") as model,
        ThreadPoolExecutor(4) as threads,
    ):

        def decode(one: torch.Tensor) -> torch.Tensor:
            return model.generate(one, drafter, max_new_tokens=30, do_sample=False)

        assert all(map(torch.equal, threads.map(decode, ids), expected))
    assert max(texts for texts, _ in seen) > 1 and max(nodes for _, nodes in seen) > 3
    assert all(texts * nodes <= 12 for texts, nodes in seen)


@pytest.mark.parametrize("wrong", [{"max_nodes": 256}, {"max_length": 2**21}, {"max_columns": 20}, {"max_batch": 0}])
def test_limits_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        ServerLimits(**wrong)


def test_a_text_is_refused_rather_than_cut(target) -> None:
    server, ids = VerifyServer(target, limits=LIMITS), prompts(1)[0]
    with connected(server) as model:
        link = model._links.take()
        for options in ({"max_new_tokens": 300}, {"max_length": 257, "max_new_tokens": None}):
            with pytest.raises(ServerRefused, match="at most 256"):
                opened(link, ids, **options)
        with pytest.raises(ServerRefused, match="at most 256"):
            model.generate(ids, CachebackDrafter(), max_length=300, forced_eos_token_id=3)
        with pytest.raises(ValueError, match="at most 256"):  # said here, before anything is sent
            model.generate(ids, CachebackDrafter(), max_new_tokens=300)
        options = {"max_length": 256, "forced_eos_token_id": 3, "do_sample": False}
        found = model.generate(ids, CachebackDrafter(), **options)
        assert torch.equal(found, plain(target, ids, **options)) and found[0, -1] == 3


def text(waiting: int = 0, tokens: int = 10, plain: bool = False) -> SimpleNamespace:
    return SimpleNamespace(waiting=waiting, most_tokens=lambda: tokens, position_bytes=0, plain=plain)


def test_texts_are_refused_where_prompts_wait_for_long() -> None:
    sessions = Sessions(ServerLimits(prompt_seconds=4.0), 1, lambda tokens: tokens / 10)
    sessions.open(text(40), "a")
    sessions.open(text(20), "b")
    with pytest.raises(Overloaded) as refused:
        sessions.open(text(1), "c")
    assert 2.0 <= refused.value.retry_seconds <= 3.0 and len(sessions) == 2 and sessions.refused == 1


def test_no_waiting_text_is_dropped_in_vain() -> None:
    size = 10 + 128 + 10 // 4
    sessions = Sessions(ServerLimits(max_bytes=3 * size), 1, lambda tokens: 0.0)
    holders = [object() for _ in range(3)]
    held = [sessions.open(text(), holder) for holder in holders]
    sessions.leave(held[0], holders[0])
    with pytest.raises(Overloaded):
        sessions.open(text(tokens=200), "d")
    assert sessions.find(held[0].name) is held[0] and sessions.lost == 0
    sessions.open(text(), "e")
    assert sessions.find(held[0].name) is None and sessions.lost == 1 and len(sessions) == 3


def test_a_text_without_drafts_is_forgotten_whatever_else_is_asked(target) -> None:
    server = VerifyServer(target, limits=ServerLimits(idle_seconds=0.5, keep_seconds=0.2, max_length=256))
    with in_background(server) as port:
        link = Link(address(port))
        opened(link, prompts(1)[0])
        end = time.monotonic() + 10
        while len(server.sessions) and time.monotonic() < end:
            link.ask(Rows(0, 0, 1), RowData)
            time.sleep(0.05)
        assert not len(server.sessions) and link.is_open


def test_a_text_that_has_ended_keeps_no_memory(target) -> None:
    server, ids = VerifyServer(target, limits=LIMITS), prompts(1)[0]
    with in_background(server) as port:
        link = Link(address(port))
        assert opened(link, ids, max_new_tokens=1).finished
        other = Link(address(port))
        first = opened(other, ids, max_new_tokens=2)
        assert server.status()["reserved_bytes"] > 0 and server.status()["held_bytes"] > 0
        draft = packed_tree(1, DraftTree.root(first.token))
        answers = [other.ask(draft, Accepted) for _ in range(2)]
        assert answers[0].finished and answers[0] == answers[1]  # it can still come twice
        status = server.status()
        assert status["reserved_bytes"] == status["held_bytes"] == 0 and status["attached"] == 2


def test_a_server_ends_when_nothing_can_be_read_any_more(target, monkeypatch, caplog) -> None:
    server = VerifyServer(target, limits=ServerLimits(max_length=256, keep_seconds=0.2))

    def broken() -> list:
        raise LookupError(SAID)

    with in_background(server) as port:
        link = Link(address(port))
        monkeypatch.setattr(server._batches, "_batch", broken)
        with pytest.raises(ServerRefused, match="failed"):
            opened(link, prompts(1)[0])

        def gone() -> bool:
            with contextlib.suppress(ServerRefused):  # it is being stopped
                try:
                    Link(address(port)).close()
                except LinkLost:
                    return True
            return False

        assert until(gone)
    assert "LookupError" in caplog.text and SAID not in caplog.text and "_run" in caplog.text


def test_an_error_is_answered_and_logged_without_what_was_said(target, caplog) -> None:
    class Broken:
        def decode(self, ids, **_):
            raise KeyError(SAID, ids)

    caplog.set_level(logging.INFO)
    with in_background(VerifyServer(target, Broken(), limits=LIMITS)) as port:
        link = Link(address(port))
        with pytest.raises(ServerRefused, match="KeyError") as refused:
            link.ask(Decode(packed_ints([5])), Text)
        assert refused.value.reason == "failed" and SAID not in str(refused.value)
        with pytest.raises(ServerRefused, match="no tokens"):
            link.ask(Decode(packed_ints([-1])), Text)
        assert link.is_open
    assert "KeyError" in caplog.text and SAID not in caplog.text


def test_connections_that_say_nothing_are_limited(target) -> None:
    limits = ServerLimits(max_length=256, max_connections=2)
    with in_background(VerifyServer(target, limits=limits)) as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        for each in silent:
            each.settimeout(0.3)
        time.sleep(0.3)
        late = socket.create_connection(("127.0.0.1", port))
        late.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert late.recv(1) == b""
        with pytest.raises(TimeoutError):
            silent[0].recv(1)
        for each in (*silent, late):
            each.close()


def test_drafts_are_limited_by_what_columns_cost() -> None:
    """Forwards of 120 ms and 3 ms a column: half of the fixed time is 20 columns."""
    known, same = BatchStatistics(), BatchStatistics()
    for place in range(40):
        assert known.worthwhile_columns() == math.inf or place >= 16
        columns = 1 + place % 5
        known.add(2, columns, 3, 0.12 + 0.003 * 2 * columns)
        same.add(2, 4, 3, 0.1)
    assert known.worthwhile_columns() == pytest.approx(20)
    assert same.worthwhile_columns() == math.inf  # what a column costs is not known where all forwards are alike
