"""`hsdraft ui`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ...cli import _shared as shared
from ...cli._shared import Dtype, bound_socket, drafter_of, load_plain_or_pair, option, say
from ...cli.serving import TRYING, say_who_is_answered
from ...core.progress import working

app = typer.Typer()


@app.command(short_help="Chat in the browser, with drafted tokens coloured.")
def ui(
    target: shared.TargetOption = None,
    drafter: shared.DrafterOption = None,
    host: shared.HostOption = "127.0.0.1",
    port: shared.PortOption = 7860,
    allowed_host: shared.AllowedHostOption = None,
    system: shared.SystemOption = None,
    max_new_tokens: Annotated[
        int, option("Maximum number of tokens per answer; the page can change it.", min=1, max=2048)
    ] = 256,
    verification: shared.VerificationOption = None,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
) -> None:
    """Serves a page for chats in the browser, with drafted tokens coloured and draft trees."""
    if find_spec("gradio") is None:
        raise ImportError("`hsdraft ui` needs gradio: pip install -e '.[ui]' in a checkout")
    from ...remote.workers import without_workers
    from ...runtime.target_loading import DEFAULT_TARGET
    from ...serve.guards import allowed_hosts
    from .page import ChatPage, serve_page
    from .talk import ReplySettings, Talks

    listener = bound_socket(host, port)
    drafter = drafter_of(target, drafter)
    with without_workers():  # a thread of the page decodes
        model, tokenizer, loaded = load_plain_or_pair(target, drafter, dtype, device, False, verification)
    hosts = allowed_hosts(host, allowed_host or ())
    talks = Talks(model, tokenizer, loaded, system)
    with working(TRYING):
        talks.warm_up()
    names = f"{target or DEFAULT_TARGET} with {Path(drafter).name}"
    page = ChatPage(talks, f"{names}, {dtype.value} on {device}", ReplySettings(max_new_tokens=max_new_tokens))
    say(f"the page is at http://{host}:{listener.getsockname()[1]}, Ctrl-C ends it")
    say_who_is_answered(host, hosts, True)
    serve_page(page, talks, listener, hosts)
