"""`hsdraft data overlap` and `hsdraft train --exclude-near`: near-duplicates of evaluation prompts in training data.

Texts are compared by n-grams of 8 words: runs of letters and digits, lower-cased. A text with fewer words is a single
n-gram. First user turns are compared, and later turns of 8 words or more. The overlap of a prompt is the greatest share
of a turn's n-grams that occur in a single training chat, 0 to 1. Above 0.5 the two are near-duplicates.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..cli._shared import TrainOption, console, option, say
from ..core.checks import printable

app = typer.Typer()
WORDS_OF_GRAM = 8
NEAR = 0.5
DEFINITION = (
    f"overlap: greatest share of the {WORDS_OF_GRAM}-grams of words of a prompt's turn that occur in the user turns of "
    f"a single training chat (a text with fewer words is one n-gram). Near-duplicate: above {NEAR}."
)

_WORD = re.compile(r"\w+")
Gram = tuple[str, ...]


def grams(text: str) -> set[Gram]:
    """Returns the n-grams of a text; none for a text without words."""
    words = _WORD.findall(text.lower())
    if len(words) < WORDS_OF_GRAM:
        return {tuple(words)} if words else set()
    return {tuple(words[at : at + WORDS_OF_GRAM]) for at in range(len(words) - WORDS_OF_GRAM + 1)}


def _compared(turns: Sequence[str]) -> list[set[Gram]]:
    """Returns the n-grams of the first turn and of later turns that are long enough; a later "Why?" is not."""
    found = [grams(turn) for turn in turns]
    return found[:1] + [own for own in found[1:] if own and len(next(iter(own))) == WORDS_OF_GRAM]


@dataclass(frozen=True)
class Overlap:
    """The training chat most like a prompt: its index, if any, and the share of the prompt's n-grams in it."""

    share: float = 0.0
    chat: int | None = None

    @property
    def near(self) -> bool:
        """Whether the two are near-duplicates."""
        return self.share > NEAR


class PromptIndex:
    """Index of the n-grams of prompts, each given by its user turns."""

    def __init__(self, prompts: Sequence[Sequence[str]]) -> None:
        self._count = len(prompts)
        self._turns = [(index, len(own)) for index, turns in enumerate(prompts) for own in _compared(turns)]
        self._holders: dict[Gram, list[int]] = defaultdict(list)
        for number, own in enumerate(own for turns in prompts for own in _compared(turns)):
            for gram in own:
                self._holders[gram].append(number)

    def shares(self, turns: Sequence[str]) -> dict[int, float]:
        """Returns a training chat's overlap with each prompt that shares an n-gram with it, by the prompt's index."""
        own = set().union(*_compared(turns))
        result: dict[int, float] = {}
        for number, count in Counter(number for gram in own for number in self._holders.get(gram, ())).items():
            index, size = self._turns[number]
            result[index] = max(result.get(index, 0.0), count / size)
        return result

    def is_near(self, turns: Sequence[str]) -> bool:
        """Whether a training chat is a near-duplicate of any of the prompts."""
        return any(share > NEAR for share in self.shares(turns).values())

    def overlaps(self, chats: Iterable[Sequence[str]]) -> list[Overlap]:
        """Returns the overlap of each prompt with training chats, given by their user turns."""
        best = [Overlap()] * self._count
        for number, turns in enumerate(chats):
            for index, share in self.shares(turns).items():
                if share > best[index].share:
                    best[index] = Overlap(share, number)
        return best


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
