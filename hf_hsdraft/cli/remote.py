"""`hsdraft remote serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from . import _shared as shared
from ._shared import Dtype, bound_socket, loaded_target, option, say

app = typer.Typer()
_TOKEN = "HSDRAFT_TOKEN"


@app.command("verify-server", short_help="Verify drafts of many devices.")
def verify_server(
    target: shared.TargetOption = None,
    host: shared.HostOption = "localhost",
    port: shared.PortOption = 8800,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
    token_file: Annotated[
        Path | None, option(f"File with the bearer token of the devices; default: the variable {_TOKEN}.")
    ] = None,
    certificate: Annotated[Path | None, option("Certificate chain, PEM; encrypts connections.")] = None,
    key: Annotated[Path | None, option("Key of the certificate, PEM.")] = None,
    max_sessions: Annotated[int, option("Maximum number of texts at a time.", min=1)] = 64,
    max_mebibytes: Annotated[
        int, option("Maximum memory for keys, values and hidden states of all texts.", min=1)
    ] = 2048,
    max_length: Annotated[int, option("Maximum number of tokens per text.", min=16, max=2**20)] = 4096,
    max_nodes: Annotated[int, option("Maximum number of nodes per draft tree.", min=1, max=4095)] = 64,
    max_batch: Annotated[int, option("Maximum number of texts per forward.", min=1)] = 32,
    max_columns: Annotated[
        int, option("Maximum product of the texts in a forward and the nodes of the largest tree.", min=2)
    ] = 256,
    wait_ms: Annotated[
        float | None,
        option("Time that a batch waits for drafting devices; default: chosen from their delays.", min=0.0),
    ] = None,
    idle_seconds: Annotated[float, option("Seconds until a silent connection is closed.", min=1.0)] = 120.0,
    hello_seconds: Annotated[
        float, option("Seconds until a connection that has said nothing yet is closed.", min=0.1)
    ] = 10.0,
    max_per_address: Annotated[
        int | None, option("Maximum number of connections of an address; default: half of all.", min=1)
    ] = None,
    keep_seconds: Annotated[float, option("Seconds to keep a text for a disconnected device.", min=0.1)] = 30.0,
    packed: Annotated[bool, option("Pack the target's weights; faster on x86 CPUs.", "--packed")] = False,
) -> None:
    """Holds the target and verifies drafts for many devices at once; they connect with hf_hsdraft.connect(url)."""
    from ..remote.connecting import check_packages

    check_packages()
    import asyncio

    from ..remote.sessions import ServerLimits
    from ..remote.verify_server import VerifyServer, server_tls
    from ..remote.workers import without_workers
    from ..runtime.target_loading import DEFAULT_TARGET

    if (certificate is None) != (key is None):
        raise typer.BadParameter("a certificate and its key go together", param_hint="--certificate")
    limits = ServerLimits(
        max_sessions=max_sessions, max_bytes=max_mebibytes << 20, max_connections=4 * max_sessions,
        max_per_address=max_per_address, hello_seconds=hello_seconds, idle_seconds=idle_seconds,
        keep_seconds=keep_seconds, max_length=max_length, max_nodes=max_nodes, max_batch=max_batch,
        max_columns=max_columns, wait_seconds=None if wait_ms is None else wait_ms / 1000,
    )  # fmt: skip
    token = _token(token_file)
    listener = bound_socket(host, port)
    tls = None if certificate is None or key is None else server_tls(str(certificate), str(key))
    with without_workers():  # the target runs on a separate thread
        model, tokenizer = loaded_target(target, dtype.torch, device)
        server = VerifyServer(model, tokenizer, target or DEFAULT_TARGET, limits, token, packed)
    scheme = "http" if tls is None else "https"
    address = f"{scheme}://{host}:{listener.getsockname()[1]}"
    secret = " (with the token)" if token else ""
    say(f"{target or DEFAULT_TARGET} verifies at {address}, its state at {address}/status{secret}")
    if host not in ("localhost", "127.0.0.1", "::1") and (tls is None or not token):
        say("anybody who reaches this address can use it or read along: give a certificate and a token")
    try:
        asyncio.run(server.run(listener, tls))
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def _token(file: Path | None) -> str:
    """The bearer token, from a file or the environment, since other users can see command lines.

    Raises a ValueError if the file is empty, or the token cannot stand in a header.
    """
    source = f"the variable {_TOKEN}" if file is None else str(file)
    token = (os.environ.get(_TOKEN, "") if file is None else file.read_text(encoding="utf-8")).strip()
    if file is not None and not token:
        raise ValueError(f"{source} is empty: expected a token")
    if not all(33 <= ord(letter) <= 126 for letter in token):
        raise ValueError(f"{source} holds spaces or letters beyond ASCII: expected a token that a header can hold")
    return token
