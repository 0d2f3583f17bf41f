"""How training chats compare with other texts: near-duplicates of evaluation prompts, and what is covered.

Texts are compared by n-grams of 8 words: runs of letters and digits, lower-cased. A text with fewer words is a single
n-gram. First user turns are compared, and later turns of 8 words or more. The overlap of a prompt is the greatest share
of a turn's n-grams that occur in a single training chat, 0 to 1. Above 0.5 the two are near-duplicates.

distinct-n and covered-n (`COVERAGE`) count n-grams of tokens, which do not cross the ends of texts (Li et al. 2016).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .conversations import Conversation, Prompt

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


DISTINCT = (1, 2, 4)
COVERED = (1, 2, 3)
COVERAGE = (
    "distinct-n: different n-grams of the answers / all of them; it falls as the amount grows. covered-n: share of the "
    "n-grams of the other texts, repetitions counted, that occur in the training answers. All n-grams are of tokens."
)

Chats = Sequence[Conversation | Prompt]
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
