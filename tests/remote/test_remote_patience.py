"""A server that is full, restarts, closes connections or has another target: what a device waits for and what not."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import make_drafter, make_target
from typer.testing import CliRunner

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.remote_server import connected, in_background
from safetensors.torch import save_file
from test_remote import plain, prompts, until
from test_remote_faults import address

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.link import Link, LinkLost, ServerRefused
from hf_hsdraft.remote.messages import TO_CLIENT
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.verify_server import VerifyServer
from hf_hsdraft.remote.wire import WireError, decode, encode

LIMITS = ServerLimits(max_length=256)


def test_another_target_is_noticed_at_a_new_connection(target) -> None:
    ids, other = prompts(1)[0], make_target(seed=3)
    other.get_input_embeddings().weight.data.copy_(target.get_input_embeddings().weight.data)
    other.get_output_embeddings().weight.data.copy_(target.get_output_embeddings().weight.data)
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        port = first.enter_context(in_background(VerifyServer(target, limits=LIMITS)))
        model = stack.enter_context(connect(f"http://127.0.0.1:{port}"))
        expected = model.generate(ids, CachebackDrafter(), max_new_tokens=9, do_sample=False)
        first.close()
        with in_background(VerifyServer(target, limits=ServerLimits(max_length=128)), port):  # limits may change
            assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False), expected)
        with in_background(VerifyServer(other, limits=LIMITS), port):
            with pytest.raises(ServerRefused, match="another target") as refused:
                model.generate(ids, CachebackDrafter(), max_new_tokens=9)
            assert refused.value.reason == "target"


def test_a_connection_that_was_closed_meanwhile_fails_no_call(target) -> None:
    server, ids = VerifyServer(target, limits=ServerLimits(max_length=256, idle_seconds=0.3)), prompts(1)[0]
    with in_background(server) as port, connect(f"http://127.0.0.1:{port}", patience=0) as model:
        assert until(lambda: server.status()["connections"] == 0)
        assert until(lambda: not model._links._idle[0].is_open)
        found = model.generate(ids, CachebackDrafter(), max_new_tokens=9, do_sample=False)
        assert torch.equal(found, plain(target, ids, max_new_tokens=9, do_sample=False))


def test_a_place_for_a_connection_is_waited_for(target) -> None:
    server = VerifyServer(target, limits=ServerLimits(max_length=256, max_connections=1))
    with in_background(server) as port:
        link = Link(address(port))
        with pytest.raises(ServerRefused, match="too many connections"):
            connect(f"http://127.0.0.1:{port}", patience=0)
        threading.Timer(0.5, link.close).start()
        with connect(f"http://127.0.0.1:{port}") as model:
            assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32
            model._links._idle[0].close()
            assert until(lambda: server.status()["connections"] == 0)
            other = Link(address(port))
            threading.Timer(0.5, other.close).start()
            assert len(model._fetch(0, 0, 2)) == 2 * 2 * 32


def test_a_text_is_resumed_after_a_connection_was_refused(target, monkeypatch) -> None:
    ids, receive, told = prompts(1)[0], Link.receive, []

    def broken(self, *kinds):
        told.append(kinds)
        if len(told) == 6:
            self.close()
            raise LinkLost("broken")
        return receive(self, *kinds)

    with connected(VerifyServer(target, limits=LIMITS)) as model:
        take, asked = model._links.take, []

        def full() -> Link:
            asked.append(None)
            if len(asked) == 2:
                raise ServerRefused("overloaded", "too many connections", 0.05)
            return take()

        monkeypatch.setattr(model._links, "take", full)
        monkeypatch.setattr(Link, "receive", broken)
        output = model.generate(
            ids, CachebackDrafter(), max_new_tokens=30, do_sample=False, return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, plain(target, ids, max_new_tokens=30, do_sample=False))
    assert (output.link.resumed, output.link.reopened) == (1, 0) and len(asked) == 3


def test_rows_are_fetched_once_for_all_threads_and_kept_on_each_device(target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    with connected(VerifyServer(target, limits=LIMITS)) as model:
        fetch, fetched = model._fetch, []
        monkeypatch.setattr(model, "_fetch", lambda *asked: fetched.append(asked) or fetch(*asked))
        ids, drafter = prompts(4), make_drafter(target)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda one: model.generate(one, drafter, max_new_tokens=6, do_sample=False), ids))
        expected = [plain(target, one, max_new_tokens=6, do_sample=False) for one in ids]
        assert all(map(torch.equal, found, expected))
        assert len(fetched) == len(set(fetched)) == 2
        here, there = (model._shell_on(torch.device(name)) for name in ("cpu", "meta"))
        for shell, device in ((here, "cpu"), (there, "meta")):
            assert shell.device.type == shell.get_input_embeddings().weight.device.type == device
            assert shell.get_output_embeddings().weight.device.type == device
        path = next((tmp_path / "hf_hsdraft").iterdir())
        save_file({"input": torch.zeros(3, 3)}, path)  # of another form: it is fetched again
        del model._with_rows[torch.device("cpu")]
        rows = model._shell_on(torch.device("cpu")).get_input_embeddings().weight
        assert torch.equal(rows, target.get_input_embeddings().weight.detach().bfloat16().float())


def test_a_fingerprint_that_is_a_path_is_refused(target) -> None:
    hello = VerifyServer(target)._hello
    assert decode(encode(hello), TO_CLIENT) == hello
    object.__setattr__(hello, "fingerprint", "../" * 20 + "abcd")
    with pytest.raises(WireError, match="fingerprint"):
        decode(encode(hello), TO_CLIENT)


def test_this_machine_is_reached_without_a_proxy(target, monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with in_background(VerifyServer(target, token="secret")) as port:
        connect(f"http://127.0.0.1:{port}", "secret").close()


def test_another_version_is_refused(target, monkeypatch) -> None:
    with in_background(VerifyServer(target)) as port:
        monkeypatch.setattr("hf_hsdraft.remote.link.PROTOCOL", "hsdraft.0")
        with pytest.raises(ServerRefused, match=r"hsdraft\.0") as refused:
            connect(f"http://127.0.0.1:{port}")
        assert refused.value.reason == "version"


def test_the_state_is_told_to_those_who_have_the_token(target) -> None:
    with in_background(VerifyServer(target, name="tiny", token="secret")) as port:
        url = f"http://127.0.0.1:{port}/status"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10)
        asked = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            status = json.load(answer)
    assert status["target"] == "tiny" and status["batches"]["forwards"] == 0 == status["batches"]["failures"]


def test_a_prompt_of_too_many_bytes_is_not_sent(target, own_tokenizer) -> None:
    with connected(VerifyServer(target, own_tokenizer)) as model:
        with pytest.raises(ValueError, match="bytes"):
            model.generate("w1 " * 60_000)
        with pytest.raises(ValueError, match="too many"):
            model.decode([5] * 5000)
        with pytest.raises(ValueError, match="integers"):
            model.decode([1.5])


@pytest.fixture
def started(target, monkeypatch):
    """What the command starts, which ends at once."""
    servers = []

    async def run(self, listener, tls=None) -> None:
        listener.close()
        servers.append((self, tls))

    monkeypatch.setattr(VerifyServer, "run", run)
    monkeypatch.setattr("hf_hsdraft.runtime.target_loading.load_target", lambda *_: (target, None))
    return servers


def test_the_command_starts_a_server_with_its_limits_and_token(started, tmp_path, monkeypatch) -> None:
    token, runner = tmp_path / "token", CliRunner()
    token.write_text("a-secret\n")
    arguments = ["verify-server", "--port", "0", "--max-nodes", "7", "--max-columns", "20", "--max-length", "100"]
    done = runner.invoke(app, [*arguments, "--token-file", str(token)])
    assert done.exit_code == 0 and "verifies at http://localhost:" in done.output and "secret" not in done.output
    [(server, tls)] = started
    assert server._token == b"a-secret" and tls is None
    assert (server.limits.max_nodes, server.limits.max_columns, server.limits.max_length) == (7, 20, 100)
    monkeypatch.setenv("HSDRAFT_TOKEN", " of-the-environment ")
    assert runner.invoke(app, arguments).exit_code == 0 and started[1][0]._token == b"of-the-environment"
    for wrong in ("", "zwölf", "two words"):
        token.write_text(wrong)
        assert isinstance(runner.invoke(app, [*arguments, "--token-file", str(token)]).exception, ValueError)
    assert runner.invoke(app, ["verify-server", "--certificate", str(token)]).exit_code == 2
    assert runner.invoke(app, ["verify-server", "--max-length", str(2**21)]).exit_code == 2
    assert isinstance(runner.invoke(app, ["verify-server", "--max-columns", "9"]).exception, ValueError)
    assert len(started) == 2
