"""`hsdraft data coverage`: how much of what a drafter will meet occurs in its training chats.

All counts are of tokens. n-grams do not cross the ends of texts.

- distinct-n: number of different n-grams of the answers divided by the number of n-grams, 0 to 1 (Li et al. 2016). It
  falls with the amount of text, so only equal amounts compare.
- covered-n: share of the n-grams of other texts that occur in the training answers, 0 to 1, repetitions counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from ..cli._shared import TargetOption, console, option

if TYPE_CHECKING:
    from ..training.data.conversations import Conversation, Prompt

app = typer.Typer()
DISTINCT = (1, 2, 4)
COVERED = (1, 2, 3)
TrainOption = Annotated[list[Path], option("Training chats: JSONL, or the folder of a run; repeat.", exists=True)]
DEFINITION = (
    "distinct-n: different n-grams of the answers / all of them; it falls as the amount grows. covered-n: share of the "
    "n-grams of the other texts, repetitions counted, that occur in the training answers. All n-grams are of tokens."
)

Chats = Sequence["Conversation | Prompt"]
Tokenize = Callable[[str], Sequence[int] | Sequence[str]]
Tokens = Sequence[int] | Sequence[str]


@dataclass(frozen=True)
class KindCounts:
    """Tokens of user and assistant in the chats of one kind, and distinct-n of the answers for each n of `DISTINCT`."""

    kind: str
    chats: int
    asked: int
    answered: int
    distinct: tuple[float, ...]


@dataclass(frozen=True)
class CoveredCounts:
    """How much of the texts of one kind occurs in the training answers: covered-n for each n of `COVERED`."""

    kind: str
    texts: int
    tokens: int
    covered: tuple[float, ...]


def count_kinds(chats: Chats, tokenize: Tokenize) -> list[KindCounts]:
    """Counts each kind, the largest first, and then all chats together."""
    tokenized = [
        (chat.category, [tokenize(text) for text in chat.turns], [tokenize(text) for text in chat.answers])
        for chat in chats
    ]

    def counted(kind: str, members: Sequence[tuple[str, list[Tokens], list[Tokens]]]) -> KindCounts:
        answers = [tokens for _, _, texts in members for tokens in texts]
        asked = sum(len(tokens) for _, texts, _ in members for tokens in texts)
        distinct = tuple(_distinct(answers, n) for n in DISTINCT)
        return KindCounts(kind, len(members), asked, sum(map(len, answers)), distinct)

    kinds = {
        kind: [each for each in tokenized if each[0] == kind] for kind in dict.fromkeys(kind for kind, *_ in tokenized)
    }
    rows = sorted((counted(kind, members) for kind, members in kinds.items()), key=lambda row: -row.answered)
    return [*rows, counted("all", tokenized)]


def count_covered(train: Chats, others: Chats, tokenize: Tokenize) -> list[CoveredCounts]:
    """Returns coverage of other texts (answers of chats, user turns of prompts) by kind, and then of all."""
    answers = [tokenize(text) for chat in train for text in chat.answers]
    known = {n: set(_grams(answers, n)) for n in COVERED}
    texts = [(chat.category, tokenize(text)) for chat in others for text in chat.answers or chat.turns]

    def counted(kind: str, members: Sequence[Tokens]) -> CoveredCounts:
        shares = tuple(_share([gram in known[n] for gram in _grams(members, n)]) for n in COVERED)
        return CoveredCounts(kind, len(members), sum(map(len, members)), shares)

    kinds = sorted({kind for kind, _ in texts})
    rows = [counted(kind, [tokens for own, tokens in texts if own == kind]) for kind in kinds]
    return [*rows, counted("all", [tokens for _, tokens in texts])]


def _grams(texts: Iterable[Tokens], n: int) -> Iterator[tuple[int | str, ...]]:
    for tokens in texts:
        yield from zip(*(tokens[start:] for start in range(n)), strict=False)


def _distinct(texts: Sequence[Tokens], n: int) -> float:
    every = list(_grams(texts, n))
    return len(set(every)) / len(every) if every else float("nan")


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else float("nan")


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
    console.print(DEFINITION, highlight=False)


def _print_kinds(title: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Prints numbers and shares by kind, the first entry of each row."""
    table = Table("kind", *(Column(name, justify="right") for name in columns), title=title, title_justify="left")
    for kind, *numbers in rows:
        shown = (f"{number:.3f}" if isinstance(number, float) else f"{number:,}" for number in numbers)
        table.add_row(escape(kind) or "none", *shown)
    console.print(table)
