"""`hsdraft data` and `hsdraft history`: what training chats hold, and what past texts a folder holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from ..core.checks import printable
from ._shared import TargetOption, console, say

app = typer.Typer()

TrainOption = Annotated[
    list[Path], typer.Option("--train", exists=True, help="Training chats: JSONL, or the folder of a run; repeat.")
]
FolderArgument = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Folder that the option `history` names.")
]
_SHOWN = 100  # characters of a text


@app.command(short_help="Count training chats by kind.")
def coverage(
    train: TrainOption,
    against: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Chats or prompts to search for in the training answers; repeat."),
    ] = None,
    target: TargetOption = None,
) -> None:
    """Counts chats and tokens by kind, and measures the variety of answers and their overlap with other texts."""
    from ..runtime.target_loading import load_tokenizer
    from ..training.data.conversations import read_chats
    from ..training.data.overlap import COVERAGE, COVERED, DISTINCT, count_covered, count_kinds

    chats = [chat for path in train for chat in read_chats(path)]
    others = [chat for path in against or () for chat in read_chats(path)]
    tokenizer = load_tokenizer(target)

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    columns = ["chats", "user tokens", "answer tokens", *(f"distinct-{n}" for n in DISTINCT)]
    kinds = count_kinds(chats, tokenize)
    _print_kinds(
        "training chats", columns, [(row.kind, row.chats, row.asked, row.answered, *row.distinct) for row in kinds]
    )
    if others:
        what = "answers" if any(chat.answers for chat in others) else "user turns"
        columns = ["texts", "tokens", *(f"covered-{n}" for n in COVERED)]
        covered = ((row.kind, row.texts, row.tokens, *row.covered) for row in count_covered(chats, others, tokenize))
        _print_kinds(f"{what} of the other texts", columns, covered)
    console.print(COVERAGE, highlight=False)


def _print_kinds(title: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Prints numbers and shares by kind, the first entry of each row."""
    table = Table("kind", *(Column(name, justify="right") for name in columns), title=title, title_justify="left")
    for kind, *numbers in rows:
        shown = (f"{number:.3f}" if isinstance(number, float) else f"{number:,}" for number in numbers)
        table.add_row(escape(kind) or "none", *shown)
    console.print(table)


@app.command(short_help="Find prompts that are in training chats.")
def overlap(
    train: TrainOption,
    prompts: Annotated[list[Path], typer.Option(exists=True, help="Evaluation prompts, JSONL; repeat.")],
    show: Annotated[int, typer.Option(min=0, help="Near-duplicates to show.")] = 10,
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
        str | None, typer.Option(help="Also print how each text begins, decoded by this tokenizer: Hub name or folder.")
    ] = None,
) -> None:
    """Lists for each target how many texts a folder holds for drafting, their tokens, and the size of the file."""
    from ..drafters.history.history import list_history

    found = list_history(folder)
    table = Table("target", "texts", "tokens", "MB")
    for each in found:
        table.add_row(each.target, f"{each.texts:,}", f"{each.tokens:,}", f"{each.bytes / 1e6:.1f}")
    console.print(table)
    if texts is not None:
        _print_texts([each.path for each in found if each.path is not None], texts)


def _print_texts(paths: list[Path], name: str) -> None:
    from transformers import AutoTokenizer

    from ..drafters.history.history_file import read_all

    tokenizer = AutoTokenizer.from_pretrained(name)
    for record in (record for path in paths for record in read_all(path)):
        say(printable(tokenizer.decode(record.tokens[:_SHOWN].tolist()), _SHOWN))


@app.command("history-erase", short_help="Erase the past texts in a folder.")
def erase(
    folder: FolderArgument,
    target: Annotated[str, typer.Option(help="Only those of this target, as `list` names it.")] = "",
) -> None:
    """Erases past texts. Processes that draft from them drop them with their next call."""
    from ..drafters.history.history import erase_history

    say(f"{erase_history(folder, target):,} texts erased")
