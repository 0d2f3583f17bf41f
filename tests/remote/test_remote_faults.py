"""Devices vanish, messages come twice or late, servers restart or are full: no text changes, no other one stops."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import socket
import ssl
import subprocess
import threading

import pytest
import torch
from conftest import VOCAB, make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.remote_server import connected, in_background
from test_remote import plain, prompts, until

from hf_hsdraft import CachebackDrafter, DraftTree
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.link import Address, Link, LinkLost, ServerRefused
from hf_hsdraft.remote.messages import Accepted, Close, Open, Opened, Resume, Resumed, packed_ints, packed_tree
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.verify_server import VerifyServer, server_tls

LIMITS = ServerLimits(max_length=256, keep_seconds=0.4)


def address(port: int) -> Address:
    return Address.of(f"http://127.0.0.1:{port}")


def opened(link: Link, ids: torch.Tensor, **options) -> Opened:
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    return link.ask(Open(packed_ints(ids[0].tolist()), ids.shape[1], 7, False, options, [], 0), Opened)


def test_a_vanished_device_is_forgotten_and_disturbs_nobody(target) -> None:
    server, ids = VerifyServer(target, limits=LIMITS), prompts(2)
    with connected(server) as model:
        link = model._links.take()
        first = opened(link, ids[0])
        link.send(packed_tree(1, DraftTree.root(first.token)))
        link._socket.socket.shutdown(socket.SHUT_RDWR)  # in the middle of a round
        found = model.generate(ids[1], CachebackDrafter(), max_new_tokens=20, do_sample=False)
        assert torch.equal(found, plain(target, ids[1], max_new_tokens=20, do_sample=False))
        assert until(lambda: len(server.sessions) == server.sessions.attached == 0)
        assert server.status()["lost"] == 1 and server.status()["held_bytes"] == 0


def test_drafts_that_come_twice_or_late_are_verified_once(target) -> None:
    server, ids = VerifyServer(target, limits=LIMITS), prompts(1)[0]
    truth = plain(target, ids, max_new_tokens=20, do_sample=False)[0].tolist()
    with in_background(server) as port:
        link, count = Link(address(port)), ids.shape[1]
        assert opened(link, ids).token == truth[count]
        draft = packed_tree(1, DraftTree.root(truth[count]))
        answers = [link.ask(draft, Accepted) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert server.status()["batches"]["forwards"] == 1
        link.ask(packed_tree(2, DraftTree.root(truth[count + 1])), Accepted)
        for number in (1, 4):
            with pytest.raises(ServerRefused, match="expected draft 3"):
                link.ask(packed_tree(number, DraftTree.root(truth[count])), Accepted)
        answer = link.ask(packed_tree(3, DraftTree.root(truth[count + 2])), Accepted)
        assert answer.tokens == packed_ints([truth[count + 3]])


def test_a_text_is_gone_on_with_over_a_new_connection(target) -> None:
    server, ids = VerifyServer(target, limits=LIMITS), prompts(1)[0]
    with in_background(server) as port:
        old, new = Link(address(port)), Link(address(port))
        begun = opened(old, ids)
        draft = packed_tree(1, DraftTree.root(begun.token))
        answer = old.ask(draft, Accepted)
        assert new.ask(Resume(begun.session), Resumed).number == 1
        assert new.ask(draft, Accepted) == answer
        with pytest.raises(ServerRefused, match="another connection"):
            old.ask(draft, Accepted)
        new.send(Close())
        assert until(lambda: len(server.sessions) == 0)
        with pytest.raises(ServerRefused, match="unknown"):
            new.ask(Resume(begun.session), Resumed)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("drafter", [CachebackDrafter(), None], ids=["drafts", "plain"])
def test_a_restart_of_the_server_changes_no_text(target, sample: bool, drafter) -> None:
    ids, options = prompts(1)[0], {"max_new_tokens": 40, "do_sample": sample}
    with contextlib.ExitStack() as running:
        stack = contextlib.ExitStack()
        port = stack.enter_context(in_background(VerifyServer(target, limits=LIMITS)))

        class Restarting:
            rounds = 0

            def put(self, value: torch.Tensor) -> None:
                self.rounds += 1
                if self.rounds == 6:
                    stack.close()
                    running.enter_context(in_background(VerifyServer(target, limits=LIMITS), port))

            def end(self) -> None: ...

        with connect(f"http://127.0.0.1:{port}") as model:
            output = model.generate(
                ids, drafter, seed=3, streamer=Restarting(), return_dict_in_generate=True, **options
            )
        assert torch.equal(output.sequences, plain(target, ids, 3, **options))
        if drafter:
            assert output.link.reopened == 1
        else:  # what a server has decoded by itself may have been under way already
            assert output.link.reopened <= 1


@pytest.mark.parametrize("sample", [False, True])
def test_connections_that_break_at_any_moment_change_no_text(target, monkeypatch, sample: bool) -> None:
    rng, send, receive = random.Random(1), Link.send, Link.receive

    def breaking(step):
        def done(self, *arguments):
            before, after = rng.random() < 0.06, rng.random() < 0.06
            if before:
                self.close()
            answer = step(self, *arguments)
            if after:  # it is lost on the way
                self.close()
                raise LinkLost("broken")
            return answer

        return done

    with connected(VerifyServer(target, limits=LIMITS)) as model:
        monkeypatch.setattr(Link, "send", breaking(send))
        monkeypatch.setattr(Link, "receive", breaking(receive))
        resumed = 0
        for seed, ids in enumerate(prompts(3)):
            options = {"max_new_tokens": 40, "do_sample": sample}
            output = model.generate(ids, CachebackDrafter(), seed=seed, return_dict_in_generate=True, **options)
            assert torch.equal(output.sequences, plain(target, ids, seed, **options))
            resumed += output.link.resumed
        assert resumed


def test_a_full_server_says_when_to_try_again_and_patience_waits(target) -> None:
    limits = ServerLimits(max_length=256, max_sessions=1)
    with in_background(VerifyServer(target, limits=limits)) as port:
        link, ids = Link(address(port)), prompts(2)
        opened(link, ids[0])
        with connect(f"http://127.0.0.1:{port}", patience=0) as hasty, pytest.raises(ServerRefused) as refused:
            hasty.generate(ids[1], max_new_tokens=5)
        assert refused.value.reason == "overloaded" and refused.value.retry_seconds > 0
        threading.Timer(0.5, link.close).start()
        with connect(f"http://127.0.0.1:{port}") as patient:
            output = patient.generate(ids[1], max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain(target, ids[1], max_new_tokens=5, do_sample=False))
        assert output.link.waited_seconds > 0


def test_memory_is_bounded_before_a_prompt_is_read(target) -> None:
    size = 2 * 3 * 2 * 8 * 4  # of a token: keys and values of 3 layers with 2 heads of 8, float32
    limits = ServerLimits(max_length=256, max_bytes=300 * size)
    server = VerifyServer(target, limits=limits)
    with in_background(server) as port:
        assert server.sessions.token_bytes == size
        link, ids = Link(address(port)), torch.full((1, 10), 5)
        opened(link, ids, max_new_tokens=50)
        other = Link(address(port))
        with pytest.raises(ServerRefused, match="no room"):
            opened(other, ids, max_new_tokens=50)
        with pytest.raises(ServerRefused, match="fewer tokens"):
            opened(other, ids, max_new_tokens=200)
        assert server.status()["reserved_bytes"] == (60 + 128 + 60 // 4) * size  # with room to grow into


def test_a_text_that_fails_takes_no_other_one_along(target, monkeypatch, caplog) -> None:
    server, ids = VerifyServer(target, limits=ServerLimits(max_length=256, wait_seconds=0.2)), prompts(2)
    read, broken = server._reader.read, []

    def failing(caches, trees, taps):
        if any(cache in broken for cache in caches):
            raise MemoryError
        return read(caches, trees, taps)

    monkeypatch.setattr(server._reader, "read", failing)
    with connected(server) as model:
        link = model._links.take()
        first = opened(link, ids[0])
        broken.append(server.sessions.find(first.session).text.cache)
        found: list[torch.Tensor] = []
        thread = threading.Thread(
            target=lambda: found.append(model.generate(ids[1], CachebackDrafter(), max_new_tokens=9, do_sample=False))
        )
        thread.start()
        with pytest.raises(ServerRefused, match="MemoryError"):
            link.ask(packed_tree(1, DraftTree.root(first.token)), Accepted)
        thread.join()
        assert torch.equal(found[0], plain(target, ids[1], max_new_tokens=9, do_sample=False))
        assert server.status()["batches"]["failures"] == 1 and "MemoryError" in caplog.text


def test_silent_connections_are_closed(target) -> None:
    server = VerifyServer(target, limits=ServerLimits(idle_seconds=0.3, keep_seconds=0.2))
    with connected(server) as model:
        link, ids = model._links.take(), prompts(1)[0]
        opened(link, ids)
        assert until(lambda: server.status()["connections"] == 0 and len(server.sessions) == 0)
        assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32  # asked over the connection that was closed
        assert until(lambda: server.status()["connections"] == 0)
        model.generate(ids, max_new_tokens=3)


def test_tokens_are_wanted_and_in_no_log(target, caplog) -> None:
    secret, ids = "a-very-secret-token", prompts(1)[0]
    caplog.set_level(logging.DEBUG)
    logging.getLogger("websockets").setLevel(logging.DEBUG)
    with in_background(VerifyServer(target, token=secret)) as port:
        for wrong in ("", "another-secret", secret + "x"):
            with pytest.raises(ServerRefused, match="token") as refused:
                connect(f"http://127.0.0.1:{port}", wrong)
            assert "secret" not in str(refused.value)
        with connect(f"http://127.0.0.1:{port}", secret) as model:
            model.generate(ids, max_new_tokens=3)
            assert secret not in repr(model._links._address)
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {secret}\r\nbro ken\r\n\r\n".encode())
            raw.recv(1000)
    assert "secret" not in caplog.text


def test_tokens_go_over_no_open_network() -> None:
    with pytest.raises(ValueError, match="unencrypted"):
        connect("http://example.com:8800", "token")
    with pytest.raises(ValueError, match="give the token"):
        connect("https://user:token@example.com")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_connections_are_encrypted_and_certificates_checked(target, tmp_path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    tls = server_tls(str(certificate), str(key))
    with in_background(VerifyServer(target, token="secret"), tls=tls) as port:
        with pytest.raises(ServerRefused, match="certificate"):
            connect(f"https://127.0.0.1:{port}", "secret")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with connect(f"https://127.0.0.1:{port}", "secret", tls=trusting) as model:
            ids = prompts(1)[0]
            found = model.generate(ids, CachebackDrafter(), max_new_tokens=9, do_sample=False)
            assert torch.equal(found, plain(target, ids, max_new_tokens=9, do_sample=False))


def test_a_page_of_a_browser_is_not_served(target) -> None:
    with in_background(VerifyServer(target)) as port, socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: hsdraft.1\r\nOrigin: http://example.com\r\n\r\n"
        )
        assert raw.recv(1000).startswith(b"HTTP/1.1 403")


def test_an_end_of_text_ends_it_everywhere() -> None:
    target = make_target(eos_token_id=list(range(0, VOCAB, 9)))
    with connected(VerifyServer(target)) as model:
        for ids in prompts(4):
            for drafter in (CachebackDrafter(), None):
                found = model.generate(ids, drafter, max_new_tokens=40, do_sample=False)
                assert torch.equal(found, plain(target, ids, max_new_tokens=40, do_sample=False, pad_token_id=0))


def test_a_call_that_is_interrupted_leaves_nothing_to_the_next_one(target, monkeypatch) -> None:
    server, ids, receive = VerifyServer(target, limits=LIMITS), prompts(1)[0], Link.receive
    with connected(server) as model:
        for drafter in (CachebackDrafter(), None):
            seen = []

            def interrupted(self, *kinds, seen=seen):
                seen.append(kinds)
                if len(seen) == 4:
                    raise KeyboardInterrupt
                return receive(self, *kinds)

            monkeypatch.setattr(Link, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate(ids, drafter, max_new_tokens=20, do_sample=False)
            monkeypatch.setattr(Link, "receive", receive)
            found = model.generate(ids, drafter, max_new_tokens=20, do_sample=False)
            assert torch.equal(found, plain(target, ids, max_new_tokens=20, do_sample=False))
        assert until(lambda: len(server.sessions) == 0)


def test_bytes_are_counted_for_each_text_alone(target) -> None:
    with connected(VerifyServer(target, limits=LIMITS)) as model:
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        counts = [(link.sent, link.received) for link in (model.generate([5, 6], None, **options).link for _ in "ab")]
        assert counts[0] == counts[1]
