"""Writes questions with checkable answers for `hsdraft quality --questions`, from prompts that have no answers.

    python -m hf_hsdraft.methods.lossy.prompt_questions prompts.jsonl questions.jsonl

A prompt's question is dropped: no rule knows its answer. The first sentences of its longest paragraph become the text
of other questions, whose answers follow from that text by rule:

- copying: repeat the first sentence. The answers are long.
- amount: the one amount of dollars of a text.
- number: the one number of a text. Texts with numbers in words, with a sign, or joined to letters are skipped.
- word: which of three words the text has. The other two are words of other prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...training.data.conversations import Prompt, read_rows
from ...training.files import write_complete
from .checked_tasks import WORDS

_SHORTEST, _LONGEST = 60, 240  # characters of a text
_SHORT = 40  # characters; a shorter sentence is not copied
_END = re.compile(r"[a-z0-9)][.?!](?=\s|$)")
_AMOUNT = re.compile(r"\$(\d+(?:,\d{3})*(?:\.\d+)?)")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_IN_WORDS = re.compile(rf"\b({'|'.join(WORDS['in numbers'])})\b", re.IGNORECASE)
_JOINED = re.compile(r"[^\s\d.,($\"']\d|\d(?:[A-Za-z/:]|[-\u2013]\w)")  # -12, B12, 3rd, 1/2, 10:30, 2-3
_WORD = re.compile(r"\b[a-z]{6,12}\b")

Asked = tuple[str, dict[str, object]]  # a question, and the fields of its answer


def text_of(prompt: str) -> str:
    """Returns the first sentences of a prompt's longest paragraph; empty if too short or too long."""
    longest = max((part.strip() for part in prompt.split("\n")), key=len)
    ends = [found.end() for found in _END.finditer(longest) if found.end() <= _LONGEST]
    return longest[: ends[-1]] if ends and ends[-1] >= _SHORTEST else ""


def _copying(text: str, others: Sequence[str]) -> Asked | None:
    sentence = text[: _END.search(text).end()]  # type: ignore[union-attr] # the text ends with one
    if len(sentence) < _SHORT or set(sentence) & set('?!:"'):
        return None
    return f"Repeat the following sentence exactly, word for word:\n\n{sentence}", {"answer": sentence}


def _is_unclear(text: str) -> bool:
    """Whether a text has numbers that can be read other than by their digits."""
    return bool(_IN_WORDS.search(text) or _JOINED.search(text))


def _amount(text: str, others: Sequence[str]) -> Asked | None:
    found = _AMOUNT.findall(text)
    if len(found) != 1 or "dollar" in text or "cents" in text or _is_unclear(text):
        return None
    asked = f"{text}\n\nWhich amount of dollars does this text name? Do not calculate anything."
    return asked, {"answer": found[0].replace(",", "")}


def _number(text: str, others: Sequence[str]) -> Asked | None:
    found = _NUMBER.findall(text)
    if len(found) != 1 or _is_unclear(text):
        return None
    asked = f"{text}\n\nWhich number does this text name? Do not calculate anything."
    return asked, {"answer": found[0].replace(",", "")}


def _word(text: str, others: Sequence[str]) -> Asked | None:
    rng = random.Random(text)
    own = sorted(set(_WORD.findall(text)))
    known = set(re.findall(r"\w+", text.lower()))
    strange = sorted({word for other in others for word in _WORD.findall(other)} - known)
    if not own or len(strange) < 2:
        return None
    answer = rng.choice(own)
    labels = [answer, *rng.sample(strange, 2)]
    rng.shuffle(labels)
    asked = f"{text}\n\nWhich of these words is in this text: {labels[0]}, {labels[1]} or {labels[2]}?"
    return f"{asked} Answer with that word only.", {"answer": answer, "labels": labels}


KINDS: dict[str, Callable[[str, Sequence[str]], Asked | None]] = {
    "copying": _copying,
    "amount": _amount,
    "number": _number,
    "word": _word,
}


def questions_of(prompts: Sequence[str], name: str, seed: int = 0) -> Iterator[dict[str, object]]:
    """Yields questions in the format of `checked_tasks.read_items`, all prompts mixed; `name` prefixes the
    task's name.
    """
    texts = list(dict.fromkeys(filter(None, map(text_of, prompts))))
    random.Random(seed).shuffle(texts)
    for place, text in enumerate(texts):
        others = [texts[(place - back) % len(texts)] for back in (1, 2)]
        for kind, ask in KINDS.items():
            asked = ask(text, others)
            if asked is not None:
                yield {"turns": [asked[0]], "category": f"{name}: {kind}", **asked[1]}


def main(
    prompts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL file with `turns`.")],
    out: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    seed: Annotated[int, typer.Option(help="Of the order of the questions.")] = 0,
) -> None:
    """Writes the questions to a file."""
    found = [prompt.turns[0] for _, prompt in read_rows(prompts) if isinstance(prompt, Prompt)]
    questions = list(questions_of(found, out.stem, seed))
    if not questions:
        raise typer.BadParameter(
            f"{prompts} has no text to ask about: expected sentences, {_SHORTEST} characters or more"
        )
    lines = [json.dumps(question) + "\n" for question in questions]
    write_complete(out, lambda temporary: Path(temporary).write_text("".join(lines), encoding="utf-8"))
    for kind in KINDS:
        print(f"{kind}: {sum(str(question['category']).endswith(f': {kind}') for question in questions)} questions")


if __name__ == "__main__":
    typer.run(main)
