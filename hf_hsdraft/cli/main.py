"""`hsdraft`, the command line. A new command is a file beside this one or of a method; `GROUPS` says its place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.models import CommandInfo

from .. import cli as commands
from .._version import __version__
from ..core import command as process
from ..core.methods import load, offered
from ..core.progress import errors, tell, working
from ._shared import option, say

app = typer.Typer(
    help="Hidden-state speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Each group: what it is for, and its commands by their names there and their own.
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "estimate": (
        "Say what training or decoding would take, by arithmetic.",
        {"training": "estimate-training", "decoding": "estimate-decoding", "hierarchy": "estimate-hierarchy"},
    ),
    "hub": (
        "Send, fetch, list, describe and export drafters.",
        {"push": "push", "pull": "pull", "list": "list", "card": "card", "export": "export"},
    ),
    "measure": (
        "Measure speed, memory, exactness and quality.",
        {
            "throughput": "throughput", "quality": "quality", "lm-eval": "lm-eval",
        },
    ),
    "data": ("Examine training chats.", {"coverage": "coverage", "overlap": "overlap"}),
    "history": ("List and erase past texts that drafts come from.", {"list": "history-list", "erase": "history-erase"}),
    "make": (
        "Make drafters and their parts out of others.",
        {
            "average": "average", "prune": "prune", "refiner": "train-refiner", "verifier": "train-verifier",
            "skip-layers": "skip-layers", "plan": "plan",
        },
    ),
    "remote": ("Draft on a device, verify on a server.", {"serve": "verify-server"}),
}  # fmt: skip
TOP = ("demo", "try", "train", "bench", "check", "serve", "chat", "ui", "info", "find", "env")  # in this order


def _commands() -> dict[str, CommandInfo]:
    """Returns all commands by their own names: those of the files here, and those of methods."""
    files = [found.name for found in pkgutil.iter_modules(commands.__path__)]
    modules = [importlib.import_module(f"{commands.__name__}.{n}") for n in files if n[0] != "_" and n != "main"]
    modules += [load("command", name) for name in offered("command")]
    apps = {id(module.app): module.app for module in modules}  # several commands may share a file
    found = [info for each in apps.values() for info in each.registered_commands]
    return {info.name or info.callback.__name__.replace("_", "-"): info for info in found if info.callback}


def _arrange() -> None:
    """Puts the commands into the groups and at the top."""
    known = _commands()
    groups = {}
    for group, (purpose, names) in GROUPS.items():
        groups[group] = typer.Typer(help=purpose, no_args_is_help=True, rich_markup_mode=None)
        here = {name: known.pop(own) for name, own in names.items() if own in known}  # methods may be away
        groups[group].registered_commands += [_named(command, name) for name, command in here.items()]
    for name in sorted(known, key=lambda name: TOP.index(name) if name in TOP else len(TOP)):
        app.registered_commands.append(_named(known[name], name))
    for group, commands_of_group in groups.items():
        if commands_of_group.registered_commands:
            app.add_typer(commands_of_group, name=group)


def _named(command: CommandInfo, name: str) -> CommandInfo:
    assert command.callback is not None
    return CommandInfo(**{**vars(command), "name": name, "callback": _running(command.callback)})


def _running(body: Callable[..., Any]) -> Callable[..., Any]:
    """A command that loads what all commands need once its options are parsed, and ends at Ctrl-C with a line."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "context" in kwargs:
            kwargs["context"].meta["began"] = time.monotonic()  # loading takes a while too
        try:
            _load_packages()
            return body(*args, **kwargs)
        except KeyboardInterrupt:
            tell(process.SAID)
            raise typer.Exit(process.STATUS) from None

    return run


def _load_packages() -> None:
    """Loads PyTorch and transformers. Raises an ImportError if transformers is too old."""
    with contextlib.nullcontext() if "torch" in sys.modules else working("loading PyTorch and transformers"):
        from ..transformers_version import needs_newer

        if (why := needs_newer()) is not None:
            raise ImportError(why)
        from transformers.utils.logging import disable_progress_bar

        from ..installation import install

        disable_progress_bar()  # of loading; commands show their progress
        install()
    process.raise_again()


_arrange()


def _print_version(asked: bool) -> None:
    if asked:
        say(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, option("Print the version.", "--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Hidden-state speculative decoding for transformers."""


def main() -> None:
    """Runs the command; errors of the user are printed in a line, without a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    finally:
        process.end_at_once()  # while threads end


if __name__ == "__main__":
    main()
