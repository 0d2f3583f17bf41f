"""`hsdraft history`: what past texts a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ...cli._shared import console, in_bytes, option, say
from ...core.checks import printable

app = typer.Typer()


def _with_texts(folder: Path) -> Path:
    if not any(folder.glob("*.history*")):
        raise typer.BadParameter(f"{folder} holds no past texts: expected the folder that the option `history` names")
    return folder


FolderArgument = Annotated[
    Path,
    typer.Argument(exists=True, file_okay=False, callback=_with_texts, help="Folder that the option `history` names."),
]
_SHOWN = 100  # characters of a text


@app.command("history-list", short_help="List the past texts in a folder.")
def show(
    folder: FolderArgument,
    texts: Annotated[
        str | None, option("Also print how each text begins, decoded by this tokenizer: Hub name or folder.")
    ] = None,
) -> None:
    """Lists for each target how many texts a folder holds for drafting, their tokens, and the size of the file."""
    from .history import list_history

    found = list_history(folder)
    table = Table("target", "texts", "tokens", "size")
    for each in found:
        table.add_row(each.target, f"{each.texts:,}", f"{each.tokens:,}", in_bytes(each.bytes))
    console.print(table)
    if texts is not None:
        _print_texts([each.path for each in found if each.path is not None], texts)


def _print_texts(paths: list[Path], name: str) -> None:
    from transformers import AutoTokenizer

    from .history import read_all

    tokenizer = AutoTokenizer.from_pretrained(name)
    for record in (record for path in paths for record in read_all(path)):
        say(printable(tokenizer.decode(record.tokens[:_SHOWN].tolist()), _SHOWN))


@app.command("history-erase", short_help="Erase the past texts in a folder.")
def erase(
    folder: FolderArgument, target: Annotated[str, option("Only those of this target, as `list` names it.")] = ""
) -> None:
    """Erases past texts. Processes that draft from them drop them with their next call."""
    from .history import erase_history

    say(f"{erase_history(folder, target):,} texts erased")
