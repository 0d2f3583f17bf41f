"""Devices vanish, messages come twice or late, servers restart or are full: no text changes, no other one stops."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import socket
import ssl
import subprocess
import threading
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch
from conftest import VOCAB, make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from remote_helpers import Streamer, fail_once, plain, prompts, serving, until

from hf_hsdraft import CachebackDrafter, DraftTree
from hf_hsdraft.remote import link as link_module
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.link import Link, LinkLost, ServerRefused
from hf_hsdraft.remote.messages import Accepted, Close, Resume, Resumed, packed_ints, packed_tree
from hf_hsdraft.remote.sessions import Sessions
from hf_hsdraft.remote.verify_server import server_tls

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def root(number: int, token: int):
    return packed_tree(number, DraftTree.root(token))


def test_a_vanished_device_is_forgotten_and_disturbs_nobody(target) -> None:
    ids = prompts(2)
    with serving(target, keep_seconds=0.4) as served, served.connect() as model:
        link, first = served.opened(ids[0])
        link.send(root(1, first.token))
        link._socket.socket.shutdown(socket.SHUT_RDWR)  # in the middle of a round
        found = model.generate(ids[1], CachebackDrafter(), **GREEDY)
        assert torch.equal(found, plain(target, ids[1], **GREEDY))
        assert until(lambda: len(served.sessions) == served.sessions.attached == 0)
        assert served.status()["lost"] == 1 and served.status()["held_bytes"] == 0


def test_drafts_that_come_twice_or_late_are_verified_once(target) -> None:
    ids = prompts(1)[0]
    truth, count = plain(target, ids, **GREEDY)[0].tolist(), ids.shape[1]
    with serving(target) as served:
        link, first = served.opened(ids)
        assert first.token == truth[count]
        answers = [link.ask(root(1, truth[count]), Accepted) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert served.status()["batches"]["forwards"] == 1
        link.ask(root(2, truth[count + 1]), Accepted)
        for number in (1, 4):
            with pytest.raises(ServerRefused, match="expected draft 3"):
                link.ask(root(number, truth[count]), Accepted)
        assert link.ask(root(3, truth[count + 2]), Accepted).tokens == packed_ints([truth[count + 3]])


def test_a_text_is_resumed_over_a_new_connection(target) -> None:
    with serving(target) as served:
        old, begun = served.opened(prompts(1)[0])
        new, draft = served.link(), root(1, begun.token)
        answer = old.ask(draft, Accepted)
        assert new.ask(Resume(begun.session), Resumed).number == 1
        assert new.ask(draft, Accepted) == answer
        with pytest.raises(ServerRefused, match="another connection"):
            old.ask(draft, Accepted)
        new.send(Close())
        assert until(lambda: len(served.sessions) == 0)
        with pytest.raises(ServerRefused, match="unknown"):
            new.ask(Resume(begun.session), Resumed)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("drafter", [CachebackDrafter(), None], ids=["drafts", "plain"])
def test_a_restart_of_the_server_changes_no_text(target, sample: bool, drafter) -> None:
    ids, options = prompts(1)[0], {"max_new_tokens": 20, "do_sample": sample}
    with contextlib.ExitStack() as running:
        stack = contextlib.ExitStack()
        served = stack.enter_context(serving(target))

        def restart(rounds: int) -> None:
            if rounds == 6:
                stack.close()
                running.enter_context(serving(target, port=served.port))

        with served.connect() as model:
            call = {**options, "streamer": Streamer(restart), "return_dict_in_generate": True}
            output = model.generate(ids, drafter, seed=3, **call)
        assert torch.equal(output.sequences, plain(target, ids, 3, **options))
        if drafter:
            assert output.link.reopened == 1
        else:  # what a server has decoded by itself may have been under way already
            assert output.link.reopened <= 1


@pytest.mark.parametrize("sample", [False, True])
def test_connections_that_break_at_any_moment_change_no_text(target, monkeypatch, sample: bool) -> None:
    rng = random.Random(1)
    monkeypatch.setattr(link_module, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(link_module, "_LONGEST_PAUSE", 0.02)

    def breaking(step):
        def done(self, *arguments):
            before, after = rng.random() < 0.1, rng.random() < 0.1
            if before:
                self.close()
            answer = step(self, *arguments)
            if after:  # it is lost on the way
                self.close()
                raise LinkLost("broken")
            return answer

        return done

    with serving(target) as served, served.connect() as model:
        for name in ("send", "receive"):
            monkeypatch.setattr(Link, name, breaking(getattr(Link, name)))
        resumed, options = 0, {"max_new_tokens": 24, "do_sample": sample}
        for seed, ids in enumerate(prompts(3)):
            output = model.generate(ids, CachebackDrafter(), seed=seed, return_dict_in_generate=True, **options)
            assert torch.equal(output.sequences, plain(target, ids, seed, **options))
            resumed += output.link.resumed
        assert resumed


def test_a_text_is_resumed_after_a_connection_was_refused(target, monkeypatch) -> None:
    ids = prompts(1)[0]
    with serving(target) as served, served.connect() as model:
        take, asked = model._links.take, []

        def full() -> Link:
            asked.append(None)
            if len(asked) == 2:
                raise ServerRefused("overloaded", "too many connections", 0.05)
            return take()

        monkeypatch.setattr(model._links, "take", full)
        fail_once(monkeypatch, 6, LinkLost("broken"))
        output = model.generate(ids, CachebackDrafter(), return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, plain(target, ids, **GREEDY))
    assert (output.link.resumed, output.link.reopened) == (1, 0) and len(asked) == 3


def test_a_call_that_is_interrupted_leaves_nothing_to_the_next_one(target, monkeypatch) -> None:
    ids = prompts(1)[0]
    with serving(target, keep_seconds=0.4) as served, served.connect() as model:
        for drafter in (CachebackDrafter(), None):
            fail_once(monkeypatch, 4, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                model.generate(ids, drafter, **GREEDY)
            assert torch.equal(model.generate(ids, drafter, **GREEDY), plain(target, ids, **GREEDY))
        assert until(lambda: len(served.sessions) == 0)
        options = {"return_dict_in_generate": True, **GREEDY}
        one, other = (model.generate(ids, None, **options).link for _ in "ab")
        assert (one.sent, one.received) == (other.sent, other.received)  # counted for each text alone


def test_a_full_server_says_when_to_try_again_and_patience_waits(target, monkeypatch) -> None:
    ids = prompts(2)
    with serving(target, max_sessions=1) as served:
        link, _ = served.opened(ids[0])
        with served.connect(patience=0) as hasty, pytest.raises(ServerRefused) as refused:
            hasty.generate(ids[1], max_new_tokens=5)
        assert refused.value.reason == "overloaded" and refused.value.retry_seconds > 0
        monkeypatch.setattr(Sessions, "retry_seconds", lambda self: 0.2)
        threading.Timer(0.3, link.close).start()
        with served.connect() as patient:
            output = patient.generate(ids[1], return_dict_in_generate=True, **GREEDY)
        assert torch.equal(output.sequences, plain(target, ids[1], **GREEDY))
        assert output.link.waited_seconds > 0


def test_a_place_for_a_connection_is_waited_for(target, monkeypatch) -> None:
    monkeypatch.setattr(Sessions, "retry_seconds", lambda self: 0.2)
    with serving(target, max_connections=1) as served:
        link = served.link()
        with pytest.raises(ServerRefused, match="too many connections"):
            served.connect(patience=0)
        threading.Timer(0.5, link.close).start()
        with served.connect() as model:
            assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32
            model._links._idle.queue[0].close()
            assert until(lambda: served.status()["connections"] == 0)
            other = served.link()
            threading.Timer(0.5, other.close).start()
            assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32


def test_another_target_is_noticed_at_a_new_connection(target) -> None:
    ids, other = prompts(1)[0], make_target(seed=3)
    other.get_input_embeddings().weight.data.copy_(target.get_input_embeddings().weight.data)
    other.get_output_embeddings().weight.data.copy_(target.get_output_embeddings().weight.data)
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        served = first.enter_context(serving(target))
        model = stack.enter_context(served.connect())
        expected = model.generate(ids, CachebackDrafter(), **GREEDY)
        first.close()
        with serving(target, port=served.port, max_length=128):  # limits may change
            assert torch.equal(model.generate(ids, **GREEDY), expected)
        with serving(other, port=served.port):
            with pytest.raises(ServerRefused, match="another target") as refused:
                model.generate(ids, CachebackDrafter(), **GREEDY)
            assert refused.value.reason == "target"


def test_a_text_that_fails_takes_no_other_one_along(target, monkeypatch, caplog) -> None:
    ids, broken, found = prompts(2), [], []
    with serving(target, wait_seconds=0.2) as served, served.connect() as model:
        read = served.server._reader.read

        def failing(caches, trees, taps):
            if any(cache in broken for cache in caches):
                raise MemoryError
            return read(caches, trees, taps)

        monkeypatch.setattr(served.server._reader, "read", failing)
        link, first = served.opened(ids[0])
        broken.append(served.sessions.find(first.session).text.cache)
        thread = threading.Thread(target=lambda: found.append(model.generate(ids[1], CachebackDrafter(), **GREEDY)))
        thread.start()
        with pytest.raises(ServerRefused, match="MemoryError"):
            link.ask(root(1, first.token), Accepted)
        thread.join()
        assert torch.equal(found[0], plain(target, ids[1], **GREEDY))
        assert served.status()["batches"]["failures"] == 1 and "MemoryError" in caplog.text


def test_silent_connections_are_closed_and_fail_no_call(target) -> None:
    ids = prompts(1)[0]
    with serving(target, idle_seconds=0.3, keep_seconds=0.2) as served, served.connect(patience=0) as model:
        served.opened(ids)
        assert until(lambda: served.status()["connections"] == 0 and len(served.sessions) == 0)
        assert until(lambda: not model._links._idle.queue[0].is_open)
        assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32  # asked over the connection that was closed
        assert until(lambda: served.status()["connections"] == 0 and not model._links._idle.queue[0].is_open)
        assert torch.equal(model.generate(ids, CachebackDrafter(), **GREEDY), plain(target, ids, **GREEDY))


def test_tokens_are_wanted_and_in_no_log(target, caplog, monkeypatch) -> None:
    """Also for the state; and this machine is reached without a proxy."""
    secret, ids = "a-very-secret-token", prompts(1)[0]
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("websockets").setLevel(logging.DEBUG)

    def status(token: str) -> dict:
        asked = Request(f"{served.url}/status", headers={"Authorization": f"Bearer {token}"})
        with build_opener(ProxyHandler({})).open(asked, timeout=10) as answer:
            return json.load(answer)

    with serving(target, token=secret) as served:
        for wrong in ("", "another-secret", secret + "x"):
            with pytest.raises(ServerRefused, match="token") as refused:
                served.connect(wrong)
            assert "secret" not in str(refused.value)
            with pytest.raises(HTTPError, match="401"):
                status(wrong)
        with served.connect(secret) as model:
            model.generate(ids, max_new_tokens=3)
            assert secret not in repr(model._links._address)
        assert status(secret)["batches"]["failures"] == 0
        with socket.create_connection(("127.0.0.1", served.port)) as raw:
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
    with serving(target, token="secret", tls=server_tls(str(certificate), str(key))) as served:
        url, ids = f"https://127.0.0.1:{served.port}", prompts(1)[0]
        with pytest.raises(ServerRefused, match="certificate"):
            connect(url, "secret")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with connect(url, "secret", tls=trusting) as model:
            assert torch.equal(model.generate(ids, CachebackDrafter(), **GREEDY), plain(target, ids, **GREEDY))


def test_another_version_is_refused_and_a_page_of_a_browser_not_served(target, monkeypatch) -> None:
    with serving(target) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as raw:
            raw.sendall(
                b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Protocol: hsdraft.1\r\nOrigin: http://example.com\r\n\r\n"
            )
            assert raw.recv(1000).startswith(b"HTTP/1.1 403")
        monkeypatch.setattr("hf_hsdraft.remote.link.PROTOCOL", "hsdraft.0")
        with pytest.raises(ServerRefused, match=r"hsdraft\.0") as refused:
            served.connect()
        assert refused.value.reason == "version"


def test_an_end_of_text_ends_it_everywhere() -> None:
    target = make_target(eos_token_id=list(range(0, VOCAB, 9)))
    with serving(target) as served, served.connect() as model:
        for ids in prompts(4):
            expected = plain(target, ids, pad_token_id=0, **GREEDY)
            for drafter in (CachebackDrafter(), None):
                assert torch.equal(model.generate(ids, drafter, **GREEDY), expected)
