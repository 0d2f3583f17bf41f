"""What a server takes on is bounded: messages, queues, memory, columns, time; and in which order it asks and tells."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.scripted import ScriptedDrafter
from remote_helpers import at_once, opening, plain, prompts, serving, until

from hf_hsdraft import CachebackDrafter, DraftTree
from hf_hsdraft.remote import verified_text
from hf_hsdraft.remote.desk import Conversation, DeviceGone
from hf_hsdraft.remote.link import LinkLost, ServerRefused
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
    unpacked_ints,
    unpacked_states,
)
from hf_hsdraft.remote.micro_batches import Arrivals, BatchStatistics
from hf_hsdraft.remote.sessions import Overloaded, ServerLimits, Sessions
from hf_hsdraft.remote.verify_server import VerifyServer

SAID = "what a device has said"


def of_length(length: int) -> torch.Tensor:
    return torch.tensor([[5, 6, 7, 8] * (length // 4)])


@pytest.fixture
def server(target):
    server = VerifyServer(target, limits=ServerLimits(max_length=256, piece=8))
    yield server
    server.close()


class Device:
    """A connection that notes what is asked of the target, and what it is told.

    Args:
        leaves_after: number of messages after which it is gone.
    """

    def __init__(self, server: VerifyServer, leaves_after: int = 99, reads: asyncio.Event | None = None) -> None:
        self._server, self._left, self._reads = server, leaves_after, reads
        self._submit, server._desk.batches.submit = server._desk.batches.submit, self.submit
        self.events: list[str] = []
        self.told: list[object] = []
        self.conversation = Conversation(server._desk, self.send, lambda: self._left > 0)

    def submit(self, job) -> None:
        if job.tree is not None:
            self.events.append("asked")
        self._submit(job)

    async def send(self, message) -> None:
        if self._left == 0:
            raise DeviceGone
        self._left -= 1
        self.told.append(message)
        if isinstance(message, Accepted):
            self.events.append("told")
        if self._reads is not None:
            await self._reads.wait()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that the server has read of all prompts."""
        return self._server.status()["batches"]["prompt_tokens"]


def test_hidden_states_come_in_pieces_that_fit_a_message(target, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    monkeypatch.setattr("hf_hsdraft.remote.desk.PIECE_BYTES", 302)  # ends within positions
    monkeypatch.setattr("hf_hsdraft.remote.verified_text.PIECE_BYTES", 302)
    ids, layers = prompts(1, seed=51)[0].repeat(1, 2), (1, 3)
    states = target(ids, output_hidden_states=True).hidden_states
    with serving(target, piece=8) as served, served.connect() as model:
        link, got = served.link(), []
        link.send(opening(ids, layers))
        while isinstance(reply := link.receive(Taps, Opened), Taps):
            got.append(reply.states)
        assert max(map(len, got)) == 302 and reply.reach == 302 // (2 * 2 * 32) - 1
        expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(unpacked_states(b"".join(got), 64).float(), expected, atol=0.03, rtol=0.02)
        found = model.generate(ids, make_drafter(target), max_new_tokens=20, do_sample=False)
        assert torch.equal(found, plain(target, ids, max_new_tokens=20, do_sample=False))
        monkeypatch.setattr("hf_hsdraft.remote.verified_text.PIECE_BYTES", 100)
        with pytest.raises(ServerRefused, match="do not fit"):
            link.ask(opening(ids, layers), Opened)


def test_nothing_more_is_read_for_a_device_that_does_not_read(server) -> None:
    async def run() -> None:
        reads = asyncio.Event()
        device = Device(server, reads=reads)
        task = asyncio.create_task(device.conversation.answer(opening(of_length(40), (1,))))
        await asyncio.sleep(0.5)
        assert device.prompt_tokens == 8 and len(device.told) == 1
        reads.set()
        await task
        assert device.prompt_tokens == 40
        assert [type(each) for each in device.told] == [Taps] * 5 + [Opened]

    asyncio.run(run())


def test_a_short_prompt_does_not_wait_for_a_long_one(server) -> None:
    async def run() -> None:
        long, short = Device(server), Device(server)
        reading = asyncio.create_task(long.conversation.answer(opening(of_length(200))))
        while not long.prompt_tokens:
            await asyncio.sleep(0)
        await short.conversation.answer(opening(of_length(8)))
        assert short.told and not long.told and short.prompt_tokens < 200
        await reading
        assert long.told

    asyncio.run(run())


def test_a_prompt_is_not_read_on_for_a_device_that_is_gone(server) -> None:
    device, is_open = Device(server), iter([True, False])
    conversation = Conversation(server._desk, device.send, lambda: next(is_open))
    with pytest.raises(DeviceGone):
        asyncio.run(conversation.answer(opening(of_length(200))))
    assert device.prompt_tokens == 8 and len(server.sessions) == 0 and not device.told


def decoded_plainly(device: Device, ids: torch.Tensor) -> None:
    options = {"do_sample": False, "max_new_tokens": 12}
    message = Open(packed_ints(ids[0].tolist()), ids.shape[1], 0, True, options, [], 0)
    asyncio.run(device.conversation.answer(message))


def test_the_next_forward_is_asked_for_before_the_device_is_told_of_the_last_one(server) -> None:
    ids, device = prompts(1, seed=3)[0], Device(server)
    decoded_plainly(device, ids)
    assert device.events == ["asked", *["asked", "told"] * 10, "told"]  # the first token comes with the prompt
    tokens = [token for each in device.told if isinstance(each, Accepted) for token in unpacked_ints(each.tokens)]
    expected = plain(server._desk.target, ids, max_new_tokens=12, do_sample=False)
    assert tokens == expected[0, ids.shape[1] + 1 :].tolist()


def test_a_device_that_leaves_costs_no_further_forwards(server) -> None:
    device = Device(server, leaves_after=5)
    with pytest.raises(DeviceGone):
        decoded_plainly(device, prompts(1, seed=4)[0])
    device.conversation.end()
    assert device.events.count("told") == 4 and device.events.count("asked") == 5
    assert len(server.sessions) == 0


def test_forwards_have_no_more_columns_than_allowed(target, monkeypatch) -> None:
    ids, options, seen = prompts(4, seed=61), {"max_new_tokens": 16, "do_sample": False}, []
    expected = [plain(target, one, **options) for one in ids]
    drafter = ScriptedDrafter(make_drafter(target), [one[0].tolist() for one in expected])
    with (
        serving(target, max_columns=12, max_nodes=11, wait_seconds=0.1) as served,
        served.connect() as model,
    ):
        read = served.server._reader.read

        def watched(caches, trees, taps):
            seen.append((len(trees), max(map(len, trees))))
            return read(caches, trees, taps)

        monkeypatch.setattr(served.server._reader, "read", watched)
        monkeypatch.setattr(Conversation, "_most_nodes", lambda self, texts: 11)  # nobody is told
        found = at_once(lambda place: model.generate(ids[place], drafter, **options), 4)
        assert all(map(torch.equal, found, expected))
    assert max(texts for texts, _ in seen) > 1 and max(nodes for _, nodes in seen) > 3
    assert all(texts * nodes <= 12 for texts, nodes in seen)


@pytest.mark.parametrize("wrong", [{"max_nodes": 256}, {"max_length": 2**21}, {"max_columns": 20}, {"max_batch": 0}])
def test_limits_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        ServerLimits(**wrong)


def test_a_text_is_refused_rather_than_cut(target) -> None:
    ids, drafter = prompts(1)[0], CachebackDrafter()
    with serving(target, max_length=48) as served, served.connect() as model:
        for options in ({"max_new_tokens": 60}, {"max_length": 49, "max_new_tokens": None}):
            with pytest.raises(ServerRefused, match="at most 48"):
                served.opened(ids, **options)
        with pytest.raises(ServerRefused, match="at most 48"):
            model.generate(ids, drafter, max_length=60, forced_eos_token_id=3)
        with pytest.raises(ValueError, match="at most 48"):  # said here, before anything is sent
            model.generate(ids, drafter, max_new_tokens=60)
        options = {"max_length": 48, "forced_eos_token_id": 3, "do_sample": False}
        found = model.generate(ids, drafter, **options)
        assert torch.equal(found, plain(target, ids, **options)) and found[0, -1] == 3


def test_memory_is_bounded_before_a_prompt_is_read(target) -> None:
    size = 2 * 3 * 2 * 8 * 4  # of a token: keys and values of 3 layers with 2 heads of 8, float32
    ids = torch.full((1, 10), 5)
    with serving(target, max_bytes=300 * size) as served:
        assert served.sessions.token_bytes == size
        served.opened(ids, max_new_tokens=50)
        for new, told in ((50, "no room"), (200, "fewer tokens")):
            with pytest.raises(ServerRefused, match=told):
                served.opened(ids, max_new_tokens=new)
        assert served.status()["reserved_bytes"] == (60 + 128 + 60 // 4) * size  # with room to grow into


def text(waiting: int = 0, tokens: int = 10) -> SimpleNamespace:
    return SimpleNamespace(waiting=waiting, most_tokens=lambda: tokens, position_bytes=0, plain=False)


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
    with serving(target, idle_seconds=0.5, keep_seconds=0.2) as served:
        link, _ = served.opened(prompts(1)[0])
        end = time.monotonic() + 10
        while len(served.sessions) and time.monotonic() < end:
            link.ask(Rows(0, 0, 1), RowData)
            time.sleep(0.05)
        assert not len(served.sessions) and link.is_open


def test_a_text_that_has_ended_keeps_no_memory(target) -> None:
    ids = prompts(1)[0]
    with serving(target) as served:
        kept = served.opened(ids, max_new_tokens=1)
        assert kept[1].finished
        link, first = served.opened(ids, max_new_tokens=2)
        assert served.status()["reserved_bytes"] > 0 and served.status()["held_bytes"] > 0
        draft = packed_tree(1, DraftTree.root(first.token))
        answers = [link.ask(draft, Accepted) for _ in range(2)]
        assert answers[0].finished and answers[0] == answers[1]  # it can still come twice
        status = served.status()
        assert status["reserved_bytes"] == status["held_bytes"] == 0 and status["attached"] == 2


def test_a_server_ends_when_nothing_can_be_read_any_more(target, monkeypatch, caplog) -> None:
    def broken() -> list:
        raise LookupError(SAID)

    with serving(target, keep_seconds=0.2) as served:
        link = served.link()
        monkeypatch.setattr(served.server._batches, "_batch", broken)
        with pytest.raises(ServerRefused, match="failed"):
            served.opened(prompts(1)[0], link)

        def gone() -> bool:
            with contextlib.suppress(ServerRefused):  # it is being stopped
                try:
                    served.link().close()
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
    with serving(target, Broken()) as served:
        link = served.link()
        with pytest.raises(ServerRefused, match="KeyError") as refused:
            link.ask(Decode(packed_ints([5])), Text)
        assert refused.value.reason == "failed" and SAID not in str(refused.value)
        with pytest.raises(ServerRefused, match="no tokens"):
            link.ask(Decode(packed_ints([-1])), Text)
        assert link.is_open
    assert "KeyError" in caplog.text and SAID not in caplog.text


GREEDY = {"max_new_tokens": 20, "do_sample": False}


def closed(connection: socket.socket) -> bool:
    connection.settimeout(5.0)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_connections_that_say_nothing_make_room_for_devices(target) -> None:
    ids = prompts(1)[0]
    with serving(target, max_connections=8, hello_seconds=2.0) as served, contextlib.ExitStack() as stack:
        silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(40)]
        for each in silent:
            stack.enter_context(each)
        with served.connect(patience=0) as model:
            assert torch.equal(model.generate(ids, CachebackDrafter(), **GREEDY), plain(target, ids, **GREEDY))
        assert all(map(closed, silent))  # the last ones had two seconds for their handshake


def test_a_server_that_is_stopped_waits_for_no_handshake(target) -> None:
    with contextlib.ExitStack() as stack:
        with serving(target, hello_seconds=60.0) as served:
            for _ in range(5):
                stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            served.link().close()  # so these have been accepted
            began = time.monotonic()
        assert time.monotonic() - began < 20.0


def test_connections_of_an_address_are_limited_and_silent_ones_are_closed(target) -> None:
    with serving(target, max_connections=8, max_per_address=2, hello_seconds=1.0) as served:
        first, second = served.link(), served.link()
        with pytest.raises(ServerRefused, match="too many connections"):
            served.link()
        assert until(lambda: served.status()["connections"] == 0)
        for link in (first, second):
            link.close()
        with served.connect(patience=0) as model:
            assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32


def test_texts_that_are_opened_again_hold_no_other_one_up(target, monkeypatch) -> None:
    """A sampled text skips the random numbers of its tokens in turns with other devices."""
    skipping = threading.Event()

    def slow_draws(*_):
        skipping.set()
        for _ in range(100):
            time.sleep(0.02)
            yield

    monkeypatch.setattr(verified_text, "skipped_draws", slow_draws)
    ids = prompts(1)[0]
    with serving(target) as served, ThreadPoolExecutor(4) as pool:
        links = [served.link() for _ in range(4)]
        for link in links:
            pool.submit(link.ask, replace(opening(ids, do_sample=True), prompt_length=1), Opened)
        assert skipping.wait(10)
        began = time.monotonic()
        with served.connect(patience=0) as model:
            assert torch.equal(model.generate(ids, CachebackDrafter(), **GREEDY), plain(target, ids, **GREEDY))
        assert time.monotonic() - began < 3.0
        for link in links:
            link.close()


@pytest.mark.parametrize("size", [97, 5_000])
def test_random_numbers_of_earlier_draws_are_skipped(size: int) -> None:
    weights = torch.rand(1, size)
    drawn, skipped = (torch.Generator().manual_seed(5) for _ in range(2))
    for _ in range(7):
        torch.multinomial(weights, num_samples=1, generator=drawn)
    for _ in verified_text.skipped_draws(skipped, size, 7):
        pass
    assert torch.equal(drawn.get_state(), skipped.get_state())


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


class Away:
    """Stands for a text; only its identity is used."""


def test_a_text_is_waited_for_that_comes_back_in_time() -> None:
    arrivals, soon, late, new = Arrivals(), Away(), Away(), Away()

    def away(text: Away, begin: float, seconds: float) -> None:
        arrivals.answered(text, begin)
        arrivals.asked(text, begin + seconds)

    for start in range(12):
        away(soon, start, 0.02 if start else 0.5)  # habits follow the last rounds
    away(late, 0.0, 0.5)
    assert arrivals.next(20.0, 21.0) is None and arrivals.away == 0  # both have asked
    arrivals.answered(late, 20.0)
    arrivals.answered(new, 20.0)
    assert arrivals.next(20.0, 20.1) is None and arrivals.away == 2  # later, or nothing is known of it
    arrivals.answered(soon, 20.0)
    known = arrivals.next(20.0, 20.1)
    assert known is not None and 20.02 < known < 20.06
    assert arrivals.next(20.07, 20.1) is None  # it is late: nobody waits for it any more
    assert arrivals.next(20.0, 20.035) == 20.035  # no longer than asked for
    arrivals.ended(soon)
    assert arrivals.next(20.0, 20.1) is None
    del new
    gc.collect()
    assert arrivals.away == 1  # a text that is forgotten is not waited for
