"""`hsdraft serve` and `hsdraft chat`."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


TargetOption = Annotated[
    str | None, typer.Option("--target", help="Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct.")
]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Hub name or folder; default: the one that comes with the target.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of target and drafter.")]
DeviceOption = Annotated[str, typer.Option(help="Device to run on.")]


def serve(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    host: Annotated[str, typer.Option(help="Name or address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    plain: Annotated[bool, typer.Option("--plain", help="Without a drafter, to compare.")] = False,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line for each request.")] = False,
) -> None:
    """Serves a target with a drafter as OpenAI's API: chat completions, completions and responses, also streamed."""
    try:
        from .server import Server, bound_socket, build_app
    except ImportError as error:
        raise ImportError(f"{error}: `hsdraft serve` needs pip install 'hf-hsdraft[serve]'") from None
    from transformers.utils import logging

    from ..attachment import attach
    from ..target.target_loading import DEFAULT_TARGET

    listener = bound_socket(host, port)
    name = target or DEFAULT_TARGET
    model, tokenizer, loaded = _load(target, drafter, dtype, device, plain)
    attachment = None if loaded is None else attach(model, loaded)
    server = Server(build_app(model, tokenizer, name, attachment), "warning" if quiet else "info")
    logging.set_verbosity_error()  # transformers warns of each request that one was received
    address = f"http://{host}:{listener.getsockname()[1]}"
    console.print(f"{name} at {address}/v1, what drafting does at {address}/drafting", highlight=False, soft_wrap=True)
    server.run(sockets=[listener])


def chat(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For sampling.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without a drafter.")] = False,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """A chat in the terminal: drafted tokens coloured, tau and tokens/s after each answer."""
    import torch

    from .chat import TerminalChat, warm_up
    from .conversation import Conversation

    model, tokenizer, loaded = _load(target, drafter, dtype, device, plain)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    conversation = Conversation(model, tokenizer, loaded, system, max_new_tokens=max_new_tokens, **sampling)
    with console.status("trying what decoding costs on this machine"):
        warm_up(model, tokenizer, loaded)
    if seed is not None:
        torch.manual_seed(seed)
    TerminalChat(conversation, console).run(echo=not sys.stdin.isatty())


def _load(target: str | None, drafter: str | None, dtype: Dtype, device: str, plain: bool) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter; no drafter for plain decoding. The smaller one is loaded first."""
    import torch

    from ..drafters.auto_drafter import AutoDrafter
    from ..target.target_loading import default_drafter, load_target

    kind: torch.dtype = getattr(torch, dtype.value)
    loaded = None
    if not plain:
        name = drafter or default_drafter(target)
        if name is None:
            advice = "no drafter comes with this target: name one, train one with `hsdraft train`, or pass --plain"
            raise typer.BadParameter(advice, param_hint="--drafter")
        loaded = AutoDrafter.from_pretrained(name, dtype=kind).to(device).eval()
    elif drafter is not None:
        raise typer.BadParameter("--plain decodes without a drafter: leave one of the two out", param_hint="--drafter")
    try:
        model, tokenizer = load_target(target, kind, device)
    except OSError as error:  # its message may not say what was looked for
        raise OSError(f"the target {target or 'by default'} cannot be loaded: {error}") from None
    if loaded is not None:
        loaded.check(model)
    return model, tokenizer, loaded
