"""`hsdraft`, the command line. A new command is a file beside this one or of a method."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .. import cli as commands
from .._version import __version__
from ..core.methods import load, offered

app = typer.Typer(
    help="Hidden-state speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for found in pkgutil.iter_modules(commands.__path__):
    if not found.name.startswith("_") and found.name != "main":
        app.add_typer(importlib.import_module(f"{commands.__name__}.{found.name}").app)
for name in offered("command"):
    app.add_typer(load("command", name).app)


def needs_newer() -> str | None:
    """See `transformers_version`; transformers is not loaded before."""
    from ..transformers_version import needs_newer as found

    return found()


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Hidden-state speculative decoding for transformers."""
    if version:
        Console().print(__version__, highlight=False)
    if version or "--help" in sys.argv:  # nothing is loaded
        return
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading; commands show their progress


def main() -> None:
    """Runs the command; errors of the user are printed in a line, without a traceback."""
    try:
        if "--help" not in sys.argv and (why := needs_newer()) is not None:
            raise ImportError(why)
        app()
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
