"""`hsdraft find`: what drafts for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ._shared import TargetArgument, console, say

if TYPE_CHECKING:
    from ..drafters.base.finding import Found

app = typer.Typer()


@app.command("find", short_help="Say which drafters there are for a target.")
def find(
    target: TargetArgument = None,
    target_name: Annotated[
        str, typer.Option(help="Name of the target on the Hub, where TARGET is a folder or file.")
    ] = "",
    offline: Annotated[bool, typer.Option("--offline", help="Look into the cache only.")] = False,
) -> None:
    """Lists what drafts for a target right now, the best first. Reads its configuration and tokenizer, no weights.

    Looks at layers for multi-token prediction in the checkpoint, drafters in the cache, published drafters whose cards
    name the target as base model, smaller language models of the same tokenizer in the cache, and n-grams.
    """
    from ..drafters.base.finding import find as found_for
    from ..drafters.base.finding import train_command
    from ..drafters.base.target_info import TargetInfo

    info = TargetInfo.of_name(target, target_name, offline)
    found, note = found_for(info, offline)
    _print(found)
    if note:
        say(note)
    if not any(each.trained for each in found):
        say(f"nothing was trained for it; this trains a drafter: {train_command(target or '')}")


def _print(found: list[Found]) -> None:
    """Prints a table, and the line of code of each row below it, which a table would break."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("")
    for title in ("name", "kind", "size", "why"):
        table.add_column(title, overflow="fold")
    for number, each in enumerate(found, 1):
        table.add_row(f"{number}", *(escape(text) for text in (each.name, each.kind, _size(each.bytes), each.why)))
    console.print(table)
    for number, each in enumerate(found, 1):
        say(f"{number}: {each.use}")


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 1e6:.1f} MB" if size else "none"
