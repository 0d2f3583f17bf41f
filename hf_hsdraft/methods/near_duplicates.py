"""Near-duplicates of evaluation prompts in training data: `hsdraft data overlap` and `hsdraft train --exclude-near`.

Texts are compared by n-grams of 8 words: runs of letters and digits, lower-cased. A text with fewer words is a single
n-gram. First user turns are compared, and later turns of 8 words or more. The overlap of a prompt is the greatest share
of a turn's n-grams that occur in a single training chat, 0 to 1. Above 0.5 the two are near-duplicates.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WORDS_OF_GRAM = 8
NEAR = 0.5

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
