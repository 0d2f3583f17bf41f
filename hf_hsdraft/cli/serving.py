"""`hsdraft serve`, `chat` and `remote serve`."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from click.core import ParameterSource

from ..core.progress import working
from . import _shared as shared
from ._shared import (
    Dtype,
    bound_socket,
    checked_device,
    console,
    drafter_of,
    load_plain_or_pair,
    loaded_target,
    option,
    say,
)

app = typer.Typer()
_TOKEN = "HSDRAFT_TOKEN"
TRYING = "trying what decoding costs on this machine"


class Engine(StrEnum):
    transformers = "transformers"
    vllm = "vllm"


@app.command(short_help="Serve a target and a drafter as OpenAI's API.", context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    target: shared.TargetOption = None,
    drafter: shared.DrafterOption = None,
    host: shared.HostOption = "localhost",
    port: shared.PortOption = 8000,
    plain: shared.PlainOption = False,
    verification: shared.VerificationOption = None,
    dtype: shared.DtypeOption = Dtype.float32,
    device: Annotated[str, option("Device to run on.")] = "cpu",  # vLLM's interpreter may find others
    quiet: Annotated[bool, option("Print no line for each request.", "--quiet")] = False,
    allowed_host: shared.AllowedHostOption = None,
    api_key: Annotated[
        str, option("Key that clients have to send.", envvar="HSDRAFT_API_KEY", show_default=False)
    ] = "",
    client_templates: Annotated[bool, option("Take chat templates that clients send.", "--client-templates")] = False,
    max_body_mebibytes: Annotated[int, option("Maximum size of a request.", min=1)] = 2,
    max_prompt: Annotated[int, option("Maximum number of characters of a prompt.", min=1)] = 1 << 20,
    prompt_seconds: Annotated[float, option("Maximum time to render and tokenize a prompt.", min=0.1)] = 30.0,
    max_stops: Annotated[int, option("Maximum number of stop strings of a request.", min=1)] = 4,
    max_beams: Annotated[int, option("Maximum number of beams of a request.", min=1)] = 8,
    max_requests: Annotated[int, option("Maximum number of requests at a time.", min=1)] = 256,
    batch: Annotated[int, option("Maximum number of requests decoded together.", min=1)] = 8,
    prefix_cache: Annotated[
        int, option("Tokens of prompts kept for prompts that begin alike; 0 for none.", min=0)
    ] = 4096,
    engine: Annotated[Engine, option("Engine that decodes; vllm starts vLLM's server.")] = Engine.transformers,
    vllm_python: Annotated[str | None, option("Interpreter with vLLM, for --engine vllm.", "--vllm-python")] = None,
    num_speculative_tokens: Annotated[
        int | None,
        option("Drafted tokens per chain, for --engine vllm; default: the drafter's, or 5 for n-grams.", min=1),
    ] = None,
) -> None:
    """Serves a target with a drafter as OpenAI's API: chat completions, completions and responses, also streamed.

    With --engine vllm, options after -- go to vLLM, and --device is cpu or cuda.
    """
    if engine is Engine.vllm:
        _become_vllm(context)
    checked_device(device)
    if num_speculative_tokens is not None:
        raise typer.BadParameter("only --engine vllm takes it: leave it out", param_hint="--num-speculative-tokens")
    if context.args:
        raise typer.BadParameter(f"{' '.join(context.args)}: only --engine vllm takes further options", param_hint="--")
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available() or find_spec("prometheus_client") is None:
        needed = "fastapi, uvicorn, openai and prometheus-client"
        raise ImportError(f"`hsdraft serve` needs {needed}: pip install -e '.[serve]' in a checkout")
    from transformers.utils import logging

    from ..generate.attachment import attach
    from ..remote.workers import without_workers
    from ..runtime.target_loading import DEFAULT_TARGET
    from ..serve.guards import RequestLimits, allowed_hosts
    from ..serve.server import Server, build_app

    hosts = allowed_hosts(host, allowed_host or ())
    limits = RequestLimits(
        max_body=max_body_mebibytes << 20, max_prompt=max_prompt, prompt_seconds=prompt_seconds, max_stops=max_stops,
        max_beams=max_beams, max_requests=max_requests,
    )  # fmt: skip
    listener = bound_socket(host, port)
    name = target or DEFAULT_TARGET
    with without_workers():  # a thread of the server decodes
        model, tokenizer, loaded = load_plain_or_pair(target, drafter, dtype, device, plain, verification)
    attachment = None if loaded is None else attach(model, loaded)
    application = build_app(
        model, tokenizer, name, attachment, limits, hosts=hosts, api_key=api_key, client_templates=client_templates,
        max_batch_size=batch, prefix_cache_tokens=prefix_cache,
    )  # fmt: skip
    server = Server(application, "warning" if quiet else "info")
    logging.set_verbosity_error()  # transformers warns at each request
    address = f"http://{host}:{listener.getsockname()[1]}"
    say(f"{name} at {address}/v1, what drafting does at {address}/drafting")
    say_who_is_answered(host, hosts, bool(api_key))
    server.run(sockets=[listener])


_NOT_FOR_VLLM = ("allowed_host", "api_key", "client_templates", "max_body_mebibytes", "max_prompt", "prompt_seconds",
                 "max_stops", "max_beams", "max_requests", "batch", "prefix_cache")  # fmt: skip


def _become_vllm(context: typer.Context) -> NoReturn:
    """Replaces this process by vLLM's server, so that signals and the exit status are vLLM's."""
    given = context.params
    if given["verification"] is not None:
        raise typer.BadParameter("vLLM verifies by its own rule: leave it out", param_hint="--verification")
    for name in _NOT_FOR_VLLM:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise typer.BadParameter("vLLM has its own options for this, after --", param_hint=_flag(name))
    drafter, number, device = given["drafter"], given["num_speculative_tokens"], given["device"]
    if given["plain"] and (drafter is not None or number is not None):
        raise typer.BadParameter("--plain decodes without a drafter: leave one of the two out", param_hint="--plain")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(
            f"{device}: vLLM chooses its devices itself: expected cpu or cuda, and name one of several GPUs by "
            "CUDA_VISIBLE_DEVICES",
            param_hint="--device",
        )
    from ..vllm_plugin.vllm_server import checked_command

    command = checked_command(
        given["vllm_python"],
        given["target"],
        None if given["plain"] else drafter_of(given["target"], drafter),
        number,
        dtype=Dtype(given["dtype"]).torch,
        host=given["host"],
        port=given["port"],
        on_cpu=device == "cpu",
        further=[*context.args, *(["--disable-uvicorn-access-log"] if given["quiet"] else [])],
    )
    say(shlex.join(command))
    os.execvp(command[0], command)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def say_who_is_answered(host: str, hosts: list[str], has_key: bool) -> None:
    """Tells the user of a server for other machines what it still needs."""
    from ..serve.guards import LOCAL_HOSTS, allowed_hosts

    if host in (*LOCAL_HOSTS, "::1"):
        return
    if not has_key:
        say("anybody who reaches this address can use it: set a key by --api-key or the variable HSDRAFT_API_KEY")
    if host in ("0.0.0.0", "::") and hosts == allowed_hosts(host):
        say("it answers to localhost only: name it as its clients do by --allowed-host, or * for any name")


@app.command(short_help="Chat in the terminal, with drafted tokens coloured.")
def chat(
    target: shared.TargetOption = None,
    drafter: shared.DrafterOption = None,
    system: shared.SystemOption = None,
    max_new_tokens: Annotated[int, option("Maximum number of tokens per answer.", min=1)] = 512,
    temperature: shared.TemperatureOption = 0.0,
    seed: Annotated[int | None, option("Seed for sampling.")] = None,
    plain: shared.PlainOption = False,
    verification: shared.VerificationOption = None,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
) -> None:
    """Chats in the terminal, with drafted tokens coloured, and tau and tokens/s after each answer."""
    import torch

    from ..serve.conversation import Conversation, TerminalChat, warm_up

    model, tokenizer, loaded = load_plain_or_pair(target, drafter, dtype, device, plain, verification)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    conversation = Conversation(model, tokenizer, loaded, system, max_new_tokens=max_new_tokens, **sampling)
    with working(TRYING):
        warm_up(model, tokenizer, loaded)
    if seed is not None:
        torch.manual_seed(seed)
    TerminalChat(conversation, console).run(echo=not sys.stdin.isatty())


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
