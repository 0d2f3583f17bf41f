"""`hsdraft remote serve`, the plan of a fleet, and the parts of the bench of many devices."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

import fleet
from remote_bench.clients import Order, run, soak
from remote_helpers import plain, prompts, serving, until

from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.lookup.cacheback import CachebackDrafter
from hf_hsdraft.remote.verify_server import VerifyServer


def test_fleet_prints_a_plan_by_given_and_by_measured_constants(tmp_path, capsys) -> None:
    fleet.main(["--fixed-ms", "20", "--column-ms", "0.5", "--least", "5"])
    assert "a forward takes 20.00 ms and 0.500 ms" in capsys.readouterr().out
    columns, seconds = [4, 8], [0.02 + 4 * 0.001, 0.02 + 8 * 0.001]
    batches = {"forwards": 2, "columns": 12, "columns_squared": 80, "verify_seconds": sum(seconds)}
    batches["columns_seconds"] = sum(c * s for c, s in zip(columns, seconds, strict=True))
    status = {"batches": batches, "token_bytes": 46080, "limits": {"max_batch": 8, "max_bytes": 2**31}}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"status": status}))
    fleet.main(["--from", str(path)])
    assert "a forward takes 20.00 ms and 1.000 ms" in capsys.readouterr().out
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no status of a server"):
        fleet.main(["--from", str(path)])
    with pytest.raises(ValueError, match="no such file"):
        fleet.main(["--from", str(tmp_path / "none.json")])
    for wrong in ("--fixed-ms", "--tau", "--least"):
        with pytest.raises(SystemExit):
            fleet.main([wrong, "0"])


@pytest.mark.parametrize("name", ["ngrams", "none"])
def test_devices_of_the_bench_decode_in_processes_of_their_own(target, name: str) -> None:
    torch.set_num_threads(1)
    ids, options = prompts(3), {"max_new_tokens": 12, "do_sample": False}
    drafter = CachebackDrafter() if name == "ngrams" else None
    with serving(target, keep_seconds=0.3) as served:
        order = Order(served.url, name, 3, [one[0].tolist() for one in ids], 2, options)
        found = run(order, drafter)
        assert len(found["texts"]) == 6
        for text in found["texts"]:
            assert torch.tensor([text["tokens"]]).equal(plain(target, ids[text["prompt"]], **options))
        restless = Order(order.url, name, 2, order.prompts, 1, options, soak_seconds=2.0)
        soaked = soak(restless, drafter)
        assert soaked["kills"] and soaked["texts"] and not soaked["wrong"]
        assert not soaked["stuck"] and not soaked["failures"]
        assert until(lambda: not len(served.sessions))


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
    arguments = ["remote", "serve", "--port", "0", "--max-nodes", "7", "--max-columns", "20", "--max-length", "100"]
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
    assert runner.invoke(app, ["remote", "serve", "--certificate", str(token)]).exit_code == 2
    assert runner.invoke(app, ["remote", "serve", "--max-length", str(2**21)]).exit_code == 2
    assert isinstance(runner.invoke(app, ["remote", "serve", "--max-columns", "9"]).exception, ValueError)
    assert len(started) == 2
