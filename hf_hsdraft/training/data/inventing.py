"""Prompts that the target itself invents, of the kinds that users write."""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .conversations import Message, Prompt
from .dataset import RowFolder
from .generating import continue_texts, reply, seeded, user_header
from .kinds import Kind, Sketch, quotas, sketch

_SHORTEST_PROMPT, _SHORTEST_DOCUMENT = 12, 40  # characters
_TURN_TOKENS = 96  # of a user's further turn
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
    on_batch: Callable[[int], object] = lambda made: None,
    on_given_up: Callable[[str], object] = lambda name: None,
) -> list[Prompt]:
    """Lets the target invent prompts of some kinds, by their shares; a ValueError if it invents too few.

    Each batch is of the kind that lacks most: the target writes the documents that its prompts need, and continues
    openings as the user. Each batch has a seed, so a restarted run makes the same prompts.

    Args:
        store: keeps the `turns` of each prompt and the name of its `kind`.
        max_prompt_tokens: greatest number of tokens of a first turn. Documents are limited to fit.
        on_batch: called with the number of prompts so far.
        on_given_up: called with the name of each kind that is given up for the others.
    """
    header = user_header(tokenizer)
    rows = {row["key"]: row for row in store.rows()}
    batch = 1 + max((row["batch"] for row in rows.values()), default=-1)
    open_kinds, idle = list(kinds), Counter[str]()
    have = Counter(row.get("kind", kinds[0].name) for row in rows.values())
    while len(rows) < count and open_kinds:
        kind, missing = _next_kind(open_kinds, have, count)
        missing = min(missing, count - len(rows))
        size = min(batch_size, missing + 2 + missing // 4)  # some will not end, or be there already
        found = _invent(target, tokenizer, header, kind, size, max_prompt_tokens, f"{seed} {batch}")
        fresh = {prompt.key: list(prompt.turns) for prompt in found if prompt.key not in rows}
        entry = {"kind": kind.name, "batch": batch}
        added = [{"key": key, "turns": turns, **entry} for key, turns in list(fresh.items())[:missing]]
        store.append(added)
        rows |= {row["key"]: row for row in added}
        have[kind.name] += len(added)
        idle[kind.name] = 0 if added else idle[kind.name] + 1
        if idle[kind.name] >= _PATIENCE:
            open_kinds.remove(kind)
            if open_kinds:
                on_given_up(kind.name)
        on_batch(len(rows))
        batch += 1
    if len(rows) < count:
        raise ValueError(
            f"the target invented only {len(rows)} of {count} prompts that end and differ; it may not be tuned to "
            "chat. Ask for fewer (--num-prompts), or pass prompts (--prompts, --dataset)"
        )
    return [prompt_of(row) for row in rows.values()][:count]


def _next_kind(kinds: Sequence[Kind], have: Counter[str], count: int) -> tuple[Kind, int]:
    """Returns the kind that lacks most of its share of `count` prompts, and how many it lacks, at least 1."""
    wanted = quotas(kinds, count - sum(have.values()) + sum(have[kind.name] for kind in kinds))
    lacking = [kind for kind in kinds if have[kind.name] < wanted[kind.name]] or kinds
    kind = min(lacking, key=lambda kind: have[kind.name] / max(wanted[kind.name], 1))
    return kind, max(wanted[kind.name] - have[kind.name], 1)


def prompt_of(row: dict[str, Any]) -> Prompt:
    return Prompt.of(row["turns"], row.get("kind", "invented"))


def invent_turns(target: Any, tokenizer: Any, histories: Sequence[Sequence[Message]], seed: int) -> list[str]:
    """Lets the target guess the user's next turn in each chat; `""` where the text does not end."""
    headers = [user_header(tokenizer, history) for history in histories]
    return [text.strip() for text in continue_texts(target, tokenizer, headers, 0.9, _TURN_TOKENS, seed)]


def _invent(
    target: Any, tokenizer: Any, header: str, kind: Kind, size: int, max_prompt_tokens: int, seed: str
) -> list[Prompt]:
    """Returns prompts of one kind, fewer than `size` where a document or a continuation is unusable."""
    sketches = [sketch(kind, random.Random(f"{seed} {index}")) for index in range(size)]
    documents = _documents(target, tokenizer, kind, sketches, max_prompt_tokens // 2, seed)
    room = max_prompt_tokens - (kind.continued if any(each.goes_on for each in sketches) else 0)
    texts = [_with_document(tokenizer, each.text, parts, room) for each, parts in zip(sketches, documents, strict=True)]
    going = [index for index, text in enumerate(texts) if text is not None and sketches[index].goes_on]
    if going:
        openings = [str(texts[index]) for index in going]
        headers = [header + opening for opening in openings]
        written = continue_texts(target, tokenizer, headers, kind.temperature, kind.continued, _number(seed))
        for index, opening, more in zip(going, openings, written, strict=True):
            whole = _joined(opening, more)
            texts[index] = whole if more.strip() and len(whole.strip()) >= _SHORTEST_PROMPT else None
    return [
        Prompt.of([text.strip(), *each.follow_ups], kind.name)
        for text, each in zip(texts, sketches, strict=True)
        if text is not None
    ]


def _documents(
    target: Any, tokenizer: Any, kind: Kind, sketches: Sequence[Sketch], max_tokens: int, seed: str
) -> list[list[str]]:
    """Returns the documents of each prompt, in whole sentences."""
    found: list[list[str]] = [[] for _ in sketches]
    tokens = min(kind.document_tokens, max_tokens)
    for part in range(max((len(each.asks) for each in sketches), default=0)):
        histories = [[{"role": "user", "content": each.asks[part]}] for each in sketches]
        with seeded(target, _number(f"{seed} document {part}")):
            written = reply(target, tokenizer, histories, kind.document_temperature, tokens)
        for parts, each in zip(found, written, strict=True):
            whole = each.text if each.new_tokens < tokens else _whole_sentences(each.text)
            if len(whole) >= _SHORTEST_DOCUMENT:
                parts.append(whole)
    return found


def _with_document(tokenizer: Any, text: str, parts: Sequence[str], room: int) -> str | None:
    """Puts as many documents into a text as fit; `None` if not even one does."""
    if "{document}" not in text:
        return text
    for count in range(len(parts), 0, -1):
        filled = text.replace("{document}", "\n\n".join(parts[:count]))
        message = [{"role": "user", "content": filled}]
        if len(tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]) <= room:
            return filled
    return None


def _whole_sentences(text: str) -> str:
    """Cuts an unfinished last sentence."""
    match = _SENTENCES.match(text)
    return match[0].strip() if match else ""


def _joined(opening: str, more: str) -> str:
    """Joins an opening and its continuation. Tokenizers differ in whether a continuation begins with the space."""
    return opening + (more.lstrip(" ") if opening.endswith(" ") else more)


def _number(seed: str) -> int:
    return zlib.crc32(seed.encode())
