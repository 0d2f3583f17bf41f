"""Kinds of prompts that users write: what they ask for (`kinds.json`), and about what (`kind_words.json`).

A template is a prompt with `{words}` in braces, drawn from `WORDS`; within a prompt, the same word is the same draw. A
word may hold slots itself. A template that ends with … is an opening, which the target continues as the user.
`{document}` stands for texts that the target writes first.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

GOES_ON = "\u2026"
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Kind:
    """A kind of prompts.

    Attributes:
        name: stored with each chat of the kind.
        templates: prompts and openings, drawn evenly.
        documents: requests by which the target writes `{document}`, drawn evenly; empty for no document.
        document_tokens: greatest number of tokens of a document.
        parts: number of documents put one after the other, each from another request.
        follow_ups: later user messages; empty for a single turn.
        turns: greatest number of follow-ups of a chat, drawn evenly from 1 on.
        continued: greatest number of tokens that the target adds to an opening.
        temperature: temperature of continuations.
        document_temperature: temperature of documents. Small targets lose the thread at higher ones.
        share: share of the prompts, relative to the other kinds'.
    """

    name: str
    templates: tuple[str, ...]
    documents: tuple[str, ...] = ()
    document_tokens: int = 256
    parts: int = 1
    follow_ups: tuple[str, ...] = ()
    turns: int = 2
    continued: int = 96
    temperature: float = 0.9
    document_temperature: float = 0.7
    share: float = 1.0


def _table(name: str) -> Any:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _kind(row: dict[str, Any]) -> Kind:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Kind(**fields)


WORDS: dict[str, list[str]] = _table("kind_words.json")
KINDS: tuple[Kind, ...] = tuple(map(_kind, _table("kinds.json")))


@dataclass(frozen=True)
class Sketch:
    """A prompt before the target has written its part.

    Attributes:
        text: the first turn, with `{document}` still in it.
        asks: requests to the target, one for each part of the document.
        goes_on: whether the target continues the text.
    """

    text: str
    asks: tuple[str, ...]
    goes_on: bool
    follow_ups: tuple[str, ...]


def sketch(kind: Kind, rng: random.Random) -> Sketch:
    """Draws template, words and follow-ups of a prompt."""
    drawn: dict[str, str] = {}

    def filled(text: str) -> str:
        def word(match: re.Match[str]) -> str:
            name = match[1]
            if name not in WORDS:
                return match[0]
            if name not in drawn:
                drawn[name] = filled(rng.choice(WORDS[name]))
            return drawn[name]

        return _SLOT.sub(word, text)

    template = rng.choice(kind.templates)
    asks = rng.sample(kind.documents, min(kind.parts, len(kind.documents)))
    later = rng.sample(kind.follow_ups, min(rng.randint(1, kind.turns), len(kind.follow_ups)))
    return Sketch(
        filled(template.removesuffix(GOES_ON)),
        tuple(filled(ask) for ask in asks),
        template.endswith(GOES_ON),
        tuple(filled(turn) for turn in later),
    )


def kind_of_openings(openings: Sequence[str]) -> Kind:
    """Returns a kind whose prompts are continuations of `openings`."""
    return Kind("invented", tuple(opening + GOES_ON for opening in openings))


def chosen_kinds(shares: Mapping[str, float]) -> list[Kind]:
    """Returns kinds with their shares, by name; all kinds evenly without shares.

    An unknown name, or a share that is not above 0, is a ValueError.
    """
    known = {kind.name: kind for kind in KINDS}
    for name, share in shares.items():
        if name not in known:
            raise ValueError(f"kinds={name!r} is unknown: expected one of {', '.join(known)}")
        if not share > 0:
            raise ValueError(f"the share {share:g} of kind {name!r} is invalid: expected above 0")
    return [replace(known[name], share=share) for name, share in shares.items()] or list(KINDS)


def quotas(kinds: Sequence[Kind], count: int) -> dict[str, int]:
    """Returns how many of `count` prompts are of each kind, by the largest remainders."""
    whole = sum(kind.share for kind in kinds)
    exact = {kind.name: count * kind.share / whole for kind in kinds}
    result = {name: int(value) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: result[name] - exact[name])
    for name in rest[: count - sum(result.values())]:
        result[name] += 1
    return result
