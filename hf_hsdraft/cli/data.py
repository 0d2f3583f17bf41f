"""`hsdraft data` and `hsdraft history`: what training chats hold, and what past texts a folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..core.checks import printable
from . import _shared as shared
from ._shared import console, option, say

app = typer.Typer()

FolderArgument = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Folder that the option `history` names.")
]
_SHOWN = 100  # characters of a text


@app.command(short_help="Find prompts that are in training chats.")
def overlap(
    train: shared.TrainOption,
    prompts: Annotated[list[Path], option("Evaluation prompts, JSONL; repeat.", exists=True)],
    show: Annotated[int, option("Near-duplicates to show.", min=0)] = 10,
) -> None:
    """Finds prompts whose text, or nearly the same text, is in training chats. Exits with 1 if there are any."""
    from ..training.data.conversations import read_chats
    from ..training.data.overlap import DEFINITION, PromptIndex

    chats = [chat.turns for path in train for chat in read_chats(path)]
    judged = [chat.turns for path in prompts for chat in read_chats(path)]
    found = PromptIndex(judged).overlaps(chats)
    near = sorted((index for index, each in enumerate(found) if each.near), key=lambda index: -found[index].share)
    table = Table("overlap", "prompt", "training chat")
    for index in near[:show]:
        chat = found[index].chat
        assert chat is not None
        table.add_row(f"{found[index].share:.2f}", _brief(judged[index]), _brief(chats[chat]))
    if near and show:
        console.print(table)
    middle = sum(0 < each.share <= 0.5 for each in found)
    say(
        f"{len(near):,} of {len(judged):,} prompts have near-duplicates among {len(chats):,} training chats; "
        f"{middle:,} share less, {len(judged) - len(near) - middle:,} nothing"
    )
    console.print(DEFINITION, highlight=False)
    if near:
        say("hsdraft train --exclude-near leaves such chats out")
        raise typer.Exit(1)


def _brief(turns: Sequence[str]) -> str:
    return escape(printable(" ".join(turns[0].split()), 60) if turns else "")


@app.command("history-list", short_help="List the past texts in a folder.")
def show(
    folder: FolderArgument,
    texts: Annotated[
        str | None, option("Also print how each text begins, decoded by this tokenizer: Hub name or folder.")
    ] = None,
) -> None:
    """Lists for each target how many texts a folder holds for drafting, their tokens, and the size of the file."""
    from ..drafters.lookup.history import list_history

    found = list_history(folder)
    table = Table("target", "texts", "tokens", "MB")
    for each in found:
        table.add_row(each.target, f"{each.texts:,}", f"{each.tokens:,}", f"{each.bytes / 1e6:.1f}")
    console.print(table)
    if texts is not None:
        _print_texts([each.path for each in found if each.path is not None], texts)


def _print_texts(paths: list[Path], name: str) -> None:
    from transformers import AutoTokenizer

    from ..drafters.lookup.history import read_all

    tokenizer = AutoTokenizer.from_pretrained(name)
    for record in (record for path in paths for record in read_all(path)):
        say(printable(tokenizer.decode(record.tokens[:_SHOWN].tolist()), _SHOWN))


@app.command("history-erase", short_help="Erase the past texts in a folder.")
def erase(
    folder: FolderArgument, target: Annotated[str, option("Only those of this target, as `list` names it.")] = ""
) -> None:
    """Erases past texts. Processes that draft from them drop them with their next call."""
    from ..drafters.lookup.history import erase_history

    say(f"{erase_history(folder, target):,} texts erased")
