"""`hsdraft export`: a drafter as a folder that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._shared import console

app = typer.Typer()


@app.command(short_help="Write a drafter for other programs.")
def export(
    drafter: Annotated[str, typer.Argument(help="Hub name or folder of the drafter.")],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="New folder.")],
    to: Annotated[str, typer.Option("--to", help="Format; that of speculators is what vLLM loads.")] = "speculators",
    target: Annotated[str, typer.Option(help="Hub name of the target to write; default: what the files say.")] = "",
) -> None:
    """Writes a drafter in a format of another project. Says why, where that format has no counterpart."""
    from ..generate.by_name import load_drafter

    if out.is_dir() and any(out.iterdir()):
        raise typer.BadParameter(f"{out} is not empty: name a new folder", param_hint="--out")
    load_drafter(drafter).export(to, out, target)
    console.print(f"{out} holds the drafter in the format of {to}", highlight=False, soft_wrap=True)
