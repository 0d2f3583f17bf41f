"""Writes questions with checkable answers for `hsdraft measure quality --questions`, from prompts that have no answers.

    python benchmarks/prompt_questions.py prompts.jsonl questions.jsonl

A prompt's question is dropped, since no rule gives its answer. The first sentences of its longest paragraph become the
text of other questions, whose answers follow by rule:

- copying: repeat the first sentence. The answers are long.
- amount: the only amount of dollars in a text.
- number: the only number in a text. Texts with numbers in words, with a sign, or joined to letters are skipped.
- word: which of three words occurs in the text. The other two come from other prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runner import options

_SHORTEST, _LONGEST = 60, 240  # characters of a text
_SHORT = 40  # characters; a shorter sentence is not copied
_END = re.compile(r"[a-z0-9)][.?!](?=\s|$)")
_AMOUNT = re.compile(r"\$(\d+(?:,\d{3})*(?:\.\d+)?)")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_JOINED = re.compile(r"[^\s\d.,($\"']\d|\d(?:[A-Za-z/:]|[-\u2013]\w)")  # -12, B12, 3rd, 1/2, 10:30, 2-3
_WORD = re.compile(r"\b[a-z]{6,12}\b")
_IN_WORDS = re.compile(
    r"\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|"
    r"forty|fifty|sixty|seventy|eighty|ninety|hundreds?|thousands?|millions?|billions?|"
    r"trillions?|dozens?|half|quarter|third|twice|once|double)\b",
    re.IGNORECASE,
)

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the questions to a file."""
    from hf_hsdraft.training.data.conversations import read_prompts

    parser = options(__doc__, seed=0)
    parser.add_argument("prompts", type=Path, help="JSONL file with `turns`")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    given = parser.parse_args(arguments)
    found = [prompt.turns[0] for prompt in read_prompts(given.prompts)]
    questions = list(questions_of(found, given.out.stem, given.seed))
    if not questions:
        parser.error(f"{given.prompts} has no text to ask about: expected sentences, {_SHORTEST} characters or more")
    given.out.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    for kind in KINDS:
        print(f"{kind}: {sum(str(question['category']).endswith(f': {kind}') for question in questions)} questions")


if __name__ == "__main__":
    main()
