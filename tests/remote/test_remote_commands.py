"""`hsdraft fleet`, and the parts of the bench of many devices."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.remote_relay import relay
from oracles.remote_server import in_background
from remote_bench.clients import Order, run, soak
from test_remote import plain, prompts, until

from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.ngrams.cacheback import CachebackDrafter
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.verify_server import VerifyServer


def test_fleet_prints_a_plan_by_given_and_by_measured_constants(tmp_path) -> None:
    runner = CliRunner()
    given = runner.invoke(app, ["fleet", "--fixed-ms", "20", "--column-ms", "0.5", "--least", "5"])
    assert given.exit_code == 0 and "a forward takes 20.00 ms and 0.500 ms" in given.output
    columns, seconds = [4, 8], [0.02 + 4 * 0.001, 0.02 + 8 * 0.001]
    batches = {"forwards": 2, "columns": 12, "columns_squared": 80, "verify_seconds": sum(seconds)}
    batches["columns_seconds"] = sum(c * s for c, s in zip(columns, seconds, strict=True))
    status = {"batches": batches, "token_bytes": 46080, "limits": {"max_batch": 8, "max_bytes": 2**31}}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"status": status}))
    measured = runner.invoke(app, ["fleet", "--from", str(path)])
    assert measured.exit_code == 0 and "a forward takes 20.00 ms and 1.000 ms" in measured.output
    path.write_text("{}")
    assert isinstance(runner.invoke(app, ["fleet", "--from", str(path)]).exception, ValueError)
    missing = runner.invoke(app, ["fleet", "--from", str(tmp_path / "none.json")]).exception
    assert isinstance(missing, ValueError) and "no such file" in str(missing)
    for wrong in ("--fixed-ms", "--tau", "--least"):
        assert runner.invoke(app, ["fleet", wrong, "0"]).exit_code == 2


def test_a_relay_adds_latency_and_limits_bandwidth() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            there, _ = listener.accept()
            while data := there.recv(2**16):
                there.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with relay(listener.getsockname()[1], 0.1, 200_000) as port:
            device = socket.create_connection(("127.0.0.1", port))
            began = time.monotonic()
            device.sendall(b"x")
            assert device.recv(1) == b"x"
            assert 0.1 <= time.monotonic() - began < 0.3
            began, sent, got = time.monotonic(), bytes(range(256)) * 400, b""
            device.sendall(sent)
            while len(got) < len(sent):
                got += device.recv(2**16)
            assert got == sent and time.monotonic() - began > 0.1 + 0.9 * len(sent) / 200_000
            device.close()


@pytest.mark.parametrize("name", ["ngrams", "none"])
def test_devices_of_the_bench_decode_in_processes_of_their_own(target, name: str) -> None:
    torch.set_num_threads(1)
    ids, options = prompts(3), {"max_new_tokens": 12, "do_sample": False}
    drafter = CachebackDrafter() if name == "ngrams" else None
    server = VerifyServer(target, limits=ServerLimits(max_length=256, keep_seconds=0.3))
    with in_background(server) as port:
        order = Order(f"http://127.0.0.1:{port}", name, 3, [one[0].tolist() for one in ids], 2, options)
        found = run(order, drafter)
        assert len(found["texts"]) == 6
        for text in found["texts"]:
            assert torch.tensor([text["tokens"]]).equal(plain(target, ids[text["prompt"]], **options))
        restless = Order(order.url, name, 2, order.prompts, 1, options, soak_seconds=4.0)
        soaked = soak(restless, drafter)
        assert soaked["kills"] and soaked["texts"] and not soaked["wrong"]
        assert not soaked["stuck"] and not soaked["failures"]
        assert until(lambda: not len(server.sessions))
