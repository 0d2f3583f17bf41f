"""Prompts that the target itself invents, of the kinds that users write.

Kinds are what prompts ask for (`kinds.json`), and about what (`kind_words.json`). A template is a prompt with `{words}`
in braces, drawn from `WORDS`; within a prompt, the same word is the same draw. A word may hold slots itself. A template
that ends with … is an opening, which the target continues as the user. `{document}` stands for texts that the target
writes first.
"""

from __future__ import annotations

import json
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ...runtime.prompt_inputs import length_of
from ..files import RowFolder
from .conversations import Message, Prompt
from .generating import Reply, TapRecorder, TargetWriter, seeded, user_header

GOES_ON = "\u2026"
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Kind:
    """A kind of prompts."""

    name: str  # stored with each chat of the kind
    templates: tuple[str, ...]  # prompts and openings, drawn evenly
    # Requests by which the target writes `{document}`, drawn evenly; empty for no document
    documents: tuple[str, ...] = ()
    document_tokens: int = 256  # greatest number of tokens of a document
    parts: int = 1  # number of documents put one after the other, each from another request
    follow_ups: tuple[str, ...] = ()  # later user messages; empty for a single turn
    turns: int = 2  # greatest number of follow-ups of a chat, drawn evenly from 1 on
    continued: int = 96  # greatest number of tokens that the target adds to an opening
    temperature: float = 0.9  # temperature of continuations
    document_temperature: float = 0.7  # temperature of documents. Small targets lose the thread at higher ones.
    share: float = 1.0  # share of the prompts, relative to the other kinds'


def _table(name: str) -> Any:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _kind(row: dict[str, Any]) -> Kind:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Kind(**fields)


WORDS: dict[str, list[str]] = _table("kind_words.json")
KINDS: tuple[Kind, ...] = tuple(map(_kind, _table("kinds.json")))


@dataclass(frozen=True)
class Sketch:
    """A prompt before the target has written its part."""

    text: str  # the first turn, with `{document}` still in it
    asks: tuple[str, ...]  # requests to the target, one for each part of the document
    goes_on: bool  # whether the target continues the text
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


OnDocument = Callable[[Kind, str, Reply], object]
_SHORTEST_PROMPT, _SHORTEST_DOCUMENT = 12, 40  # characters
_PATIENCE = 10  # number of batches without a new prompt after which a kind is given up
_SENTENCES = re.compile(r".*[.!?\u3002\uff01\uff1f\n]", re.DOTALL)


def invent_prompts(
    target: Any,
    tokenizer: Any,
    count: int,
    store: RowFolder,
    kinds: Sequence[Kind],
    *,
    max_prompt_tokens: int = 1024,
    batch_size: int = 64,
    seed: int = 0,
    recorder: TapRecorder | None = None,
    on_document: OnDocument = lambda kind, ask, reply: None,
    on_given_up: Callable[[str], object] = lambda name: None,
    seconds: Callable[[], float | None] = lambda: None,
) -> Iterator[list[Prompt]]:
    """Lets the target invent prompts of some kinds, by their shares, and yields those that are new, batch by batch.

    Each batch is of the kind that lacks most: the target writes the documents that its prompts need, and continues
    openings as the user. Each batch has a seed, so a restarted run makes the same prompts.

    Args:
        count: number of prompts in the end, with those in the store; fewer if the target can invent no more.
        max_prompt_tokens: greatest number of tokens of a first turn. Documents are limited to fit.
        recorder: keeps the hidden states of what is read for documents.
        on_document: called with a document's kind, the request for it and what the target wrote.
        on_given_up: called with the name of each kind that is given up for the others.
        seconds: returns the greatest time of a batch, after which smaller ones follow; `None` for no limit.
    """
    header, open_kinds, idle = user_header(tokenizer), list(kinds), Counter[str]()
    known, have, batch, limit = set[str](), Counter[str](), 0, batch_size
    for row in store.rows():
        known.add(row["key"])
        have[row.get("kind", kinds[0].name)] += 1
        batch = max(batch, row["batch"] + 1)
    while len(known) < count and open_kinds:
        kind, missing = _next_kind(open_kinds, have, count)
        begin, named, most = time.monotonic(), f"{seed} {batch}", seconds()
        limit = batch_size if most is None else limit
        missing = min(missing, limit, count - len(known))
        size = min(limit, missing + 2 + missing // 4)  # some will not end, or be there already
        writes = TargetWriter(target, tokenizer, recorder, lambda most=most: most)  # type: ignore[misc]
        writer = _Writer(writes, header, kind, max_prompt_tokens, named, on_document)
        fresh = {prompt.key: prompt for prompt in writer.prompts(size) if prompt.key not in known}
        added = list(fresh.values())[:missing]
        entry = {"kind": kind.name, "batch": batch}
        store.append([{"key": prompt.key, "turns": list(prompt.turns), **entry} for prompt in added])
        known.update(prompt.key for prompt in added)
        have[kind.name] += len(added)
        idle[kind.name] = 0 if added else idle[kind.name] + 1
        if idle[kind.name] >= _PATIENCE:
            open_kinds.remove(kind)
            if open_kinds:
                on_given_up(kind.name)
        batch += 1
        if most is not None and time.monotonic() - begin >= most:
            limit = max(limit // 4, 1)
        yield added


def shortage(found: int, count: int) -> str:
    """Returns what to do about too few invented prompts; empty if there are enough."""
    if found >= count:
        return ""
    return (
        f"the target invented only {found} of {count} prompts that end and differ; it may not be tuned to chat. Ask "
        "for fewer (--num-prompts), or pass prompts (--prompts, --dataset)"
    )


def _next_kind(kinds: Sequence[Kind], have: Counter[str], count: int) -> tuple[Kind, int]:
    """Returns the kind that lacks most of its share of `count` prompts, and how many it lacks, at least 1."""
    wanted = quotas(kinds, count - sum(have.values()) + sum(have[kind.name] for kind in kinds))
    lacking = [kind for kind in kinds if have[kind.name] < wanted[kind.name]] or kinds
    kind = min(lacking, key=lambda kind: have[kind.name] / max(wanted[kind.name], 1))
    return kind, max(wanted[kind.name] - have[kind.name], 1)


def prompt_of(row: dict[str, Any]) -> Prompt:
    return Prompt.of(row["turns"], row.get("kind", "invented"))


@dataclass(frozen=True)
class _Writer:
    """Writes a batch of prompts of one kind."""

    writer: TargetWriter
    header: str
    kind: Kind
    max_prompt_tokens: int
    seed: str
    on_document: OnDocument

    def prompts(self, size: int) -> list[Prompt]:
        """Returns `size` prompts, or fewer where a document or a continuation is unusable."""
        kind = self.kind
        sketches = [sketch(kind, random.Random(f"{self.seed} {index}")) for index in range(size)]
        documents = self._documents(sketches)
        room = self.max_prompt_tokens - (kind.continued if any(each.goes_on for each in sketches) else 0)
        texts = [
            _with_document(self.writer.tokenizer, each.text, parts, room)
            for each, parts in zip(sketches, documents, strict=True)
        ]
        going = [index for index, text in enumerate(texts) if text is not None and sketches[index].goes_on]
        openings = [str(texts[index]) for index in going]
        headers, drawn = [self.header + opening for opening in openings], (kind.temperature, kind.continued)
        continued = self.writer.continued(headers, *drawn, _number(self.seed)) if headers else []
        for index, opening, more in zip(going, openings, continued, strict=True):
            # Tokenizers differ in whether a continuation begins with the space.
            whole = opening + (more.lstrip(" ") if opening.endswith(" ") else more)
            texts[index] = whole if more.strip() and len(whole.strip()) >= _SHORTEST_PROMPT else None
        return [
            Prompt.of([text.strip(), *each.follow_ups], kind.name)
            for text, each in zip(texts, sketches, strict=True)
            if text is not None
        ]

    def _documents(self, sketches: Sequence[Sketch]) -> list[list[str]]:
        """Returns the documents of each prompt, in whole sentences."""
        kind, found = self.kind, [list[str]() for _ in sketches]
        tokens = min(kind.document_tokens, self.max_prompt_tokens // 2)
        for part in range(max((len(each.asks) for each in sketches), default=0)):
            asks = [each.asks[part] for each in sketches]
            histories: list[list[Message]] = [[{"role": "user", "content": ask}] for ask in asks]
            with seeded(self.writer.target, _number(f"{self.seed} document {part}")):
                written = self.writer.reply(histories, kind.document_temperature, tokens)
            for parts, ask, each in zip(found, asks, written, strict=True):
                self.on_document(kind, ask, each)
                cut = _SENTENCES.match(each.text)  # the last sentence may be unfinished
                whole = each.text if each.new_tokens < tokens else cut[0].strip() if cut else ""
                if len(whole) >= _SHORTEST_DOCUMENT:
                    parts.append(whole)
        return found


def _with_document(tokenizer: Any, text: str, parts: Sequence[str], room: int) -> str | None:
    """Puts as many documents into a text as fit; `None` if not even one does."""
    if "{document}" not in text:
        return text
    for count in range(len(parts), 0, -1):
        filled = text.replace("{document}", "\n\n".join(parts[:count]))
        if length_of(tokenizer, filled) <= room:
            return filled
    return None


def _number(seed: str) -> int:
    return zlib.crc32(seed.encode())
