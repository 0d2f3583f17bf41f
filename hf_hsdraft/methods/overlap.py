"""`hsdraft data overlap`: prompts whose text, or nearly the same text, is in training chats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..cli._shared import console, option, say
from ..core.checks import printable
from .coverage import TrainOption
from .near_duplicates import NEAR, WORDS_OF_GRAM, PromptIndex

app = typer.Typer()
DEFINITION = (
    f"overlap: greatest share of the {WORDS_OF_GRAM}-grams of words of a prompt's turn that occur in the user turns of "
    f"a single training chat (a text with fewer words is one n-gram). Near-duplicate: above {NEAR}."
)


@app.command(short_help="Find prompts that are in training chats.")
def overlap(
    train: TrainOption,
    prompts: Annotated[list[Path], option("Evaluation prompts, JSONL; repeat.", exists=True)],
    show: Annotated[int, option("Near-duplicates to show.", min=0)] = 10,
) -> None:
    """Finds prompts whose text, or nearly the same text, is in training chats. Exits with 1 if there are any."""
    from ..training.data.conversations import read_chats

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
