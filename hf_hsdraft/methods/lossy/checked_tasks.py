"""Tasks with checkable answers: generated ones, easy enough for small targets, and ones read from files.

Each item is a message to the target and a rule that checks the answer as a person would read it: a number is the last
number named, a label is the one named first. Words that a text must contain may be in any order and in the plural.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...training.data.conversations import Prompt, read_rows

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+")  # of any script


@dataclass(frozen=True)
class Item:
    """A message with its right answer, checked as a `"number"`, `"label"` (of all labels), `"contains"` or `"all"`."""

    task: str
    prompt: str
    answer: str
    kind: str
    labels: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the question, 16 hexadecimal digits."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]

    def is_right(self, text: str) -> bool:
        words = _words(text)
        if self.kind == "number":
            found = numbers_of(text)
            return bool(found) and abs(found[-1] - numbers_of(self.answer)[-1]) < 1e-6
        if self.kind == "label":
            places = {label: words.find(_words(label)) for label in self.labels}
            named = {label: place for label, place in places.items() if place >= 0}
            return min(named, key=named.__getitem__, default=None) == self.answer
        if self.kind == "contains":
            return _words(self.answer) in words
        parts = self.answer.split(", ")  # all of them
        return all(any(_words(part + end) in words for end in ("", "s", "es")) for part in parts)


def _words(text: str) -> str:
    """The words of a text in lower case, each between two spaces."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def numbers_of(text: str) -> list[float]:
    """Returns the numbers that a text names, in order; commas may separate thousands."""
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("task_words.json").read_text(encoding="utf-8"))


def _word(rng: random.Random, kind: str) -> str:
    return rng.choice(WORDS[kind])


def _copying(rng: random.Random) -> Item:
    sentence = (
        f"The {_word(rng, 'colours')} {_word(rng, 'animals')} {_word(rng, 'deeds')} {_word(rng, 'places')}, and "
        f"{_word(rng, 'names')} has a {_word(rng, 'colours')} {_word(rng, 'things')}."
    )
    prompt = f"Repeat the following sentence exactly, word for word:\n\n{sentence}"
    return Item("copying", prompt, sentence, "contains")


def _addition(rng: random.Random) -> Item:
    one, other = rng.randint(1, 9), rng.randint(1, 9)
    asked = rng.choice(("What is {} + {}?", "Calculate {} + {}.", "Add {} and {}.", "How much is {} plus {}?"))
    prompt = f"{asked.format(one, other)} Give the result as a number."
    return Item("addition", prompt, str(one + other), "number")


def _sentiment(rng: random.Random) -> Item:
    good = rng.random() < 0.5
    thing, words = _word(rng, "judged"), rng.sample(WORDS["good"] if good else WORDS["bad"], 2)
    verdict = "I loved it" if good else "I hated it"
    prompt = (
        f"Review: The {thing} was {words[0]} and {words[1]}. {verdict}.\n\nIs this review positive or negative? Answer "
        "with one word."
    )
    return Item("sentiment", prompt, "positive" if good else "negative", "label", ("positive", "negative"))


def _choosing(rng: random.Random) -> Item:
    groups = {
        "an animal": WORDS["animals"],
        "a colour": WORDS["colours"],
        "something to eat": WORDS["foods"],
        "a city": WORDS["cities"],
    }
    kind = rng.choice(list(groups))
    answer = rng.choice(groups[kind])
    offered = [answer, *rng.sample(WORDS["things"], 2)]
    rng.shuffle(offered)
    prompt = f"Which of these words is {kind}: {offered[0]}, {offered[1]} or {offered[2]}? Answer with that word only."
    return Item("choosing", prompt, answer, "label", tuple(offered))


def _extraction(rng: random.Random) -> Item:
    name, city, job = _word(rng, "names"), _word(rng, "cities"), _word(rng, "jobs")
    age = rng.randint(21, 69)
    asked = rng.choice(("city", "job", "age"))
    question, answer = {
        "city": (f"In which city does {name} live?", city),
        "job": (f"What is the job of {name}?", job),
        "age": (f"How old is {name}?", str(age)),
    }[asked]
    passage = f"{name} is {age} years old and lives in {city}. {name} works as a {job}."
    return Item("extraction", f"{passage}\n\n{question}", answer, "contains")


def _counting(rng: random.Random) -> Item:
    first = rng.randint(1, 40)
    last = first + rng.randint(5, 12)
    answer = " ".join(map(str, range(first, last + 1)))
    prompt = f"List the numbers {first}, {first + 1}, {first + 2} and so on, up to {last}."
    return Item("counting", prompt, answer, "contains")


def _explaining(rng: random.Random) -> Item:
    name, thing = _word(rng, "names"), _word(rng, "foods")
    one, other = rng.randint(2, 9), rng.randint(1, 9)
    prompt = (
        f"{name} has {one} pieces of {thing} and gets {other} more. How many pieces of {thing} does {name} have now? "
        "Explain your answer, and end with the number."
    )
    return Item("explaining", prompt, str(one + other), "number")


def _writing(rng: random.Random) -> Item:
    words = ", ".join((_word(rng, "names"), _word(rng, "animals"), _word(rng, "things")))
    prompt = f"Write a story of two or three sentences. All of these words have to be in it: {words}."
    return Item("writing", prompt, words, "all")


GENERATED: dict[str, Callable[[random.Random], Item]] = {
    "copying": _copying,
    "addition": _addition,
    "sentiment": _sentiment,
    "choosing": _choosing,
    "extraction": _extraction,
    "counting": _counting,
    "explaining": _explaining,
    "writing": _writing,
}


def make_items(task: str, count: int, seed: int = 0, without: Collection[str] = ()) -> list[Item]:
    """Returns at most `count` distinct items of a task, the same for a seed.

    A task may have fewer: there are 324 questions for sums of two digits. `without` are digests of excluded questions.
    Raises a ValueError for an unknown task.
    """
    if task not in GENERATED:
        raise ValueError(f"no task {task!r}: expected some of {', '.join(GENERATED)}")
    rng = random.Random(f"{task} {seed}")
    found: dict[str, Item] = {}
    for _ in range(50 * count):
        item = GENERATED[task](rng)
        if item.digest not in without:
            found.setdefault(item.prompt, item)
        if len(found) == count:
            break
    return list(found.values())


def read_items(path: Path) -> list[Item]:
    """Reads questions with answers from a JSONL file: `turns`, `answer`, and `labels` for a choice.

    Of an answer in GSM8K's format, what follows `####` counts. The task is the line's `category`, or the file's name.
    A ValueError for a line without an answer, one that is none of its labels, or one without letters and digits.
    """
    return [_read(path, row, prompt) for row, prompt in read_rows(path) if isinstance(prompt, Prompt)]


def _read(path: Path, row: dict[str, object], prompt: Prompt) -> Item:
    answer, labels = row.get("answer"), row.get("labels") or ()
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"{path}: {prompt.turns[0]!r:.60} has no `answer`: expected a text or a number")
    text = str(answer).rpartition("####")[2].strip()
    if not isinstance(labels, list | tuple) or (labels and text not in map(str, labels)):
        raise ValueError(f"{path}: {prompt.turns[0]!r:.60} has answer {text!r}: expected one of its labels {labels!r}")
    named = [str(label) for label in labels]
    for each in (text, *named):
        if not _WORD.search(each):
            raise ValueError(f"{path}: {prompt.turns[0]!r:.60} has {each!r}: expected an answer with letters or digits")
    kind = "label" if labels else "number" if _NUMBER.fullmatch(text) else "contains"
    return Item(prompt.category or path.stem, prompt.turns[0], text, kind, tuple(named))


def items_of(
    tasks: Sequence[str], files: Sequence[Path], count: int, seed: int = 0, without: Collection[str] = ()
) -> list[Item]:
    """Returns at most `count` items of each generated task and of each task in the files.

    `without` are digests of excluded questions. Raises a ValueError as `make_items` and `read_items` do, or if no
    item is left.
    """
    found = [item for task in tasks for item in make_items(task, count, seed, without)]
    for path in files:
        taken: Counter[str] = Counter()
        for item in read_items(path):
            if item.digest not in without and taken[item.task] < count:
                taken[item.task] += 1
                found.append(item)
    if not found:
        new = " that no rule was trained with" if without else ""
        raise ValueError(f"no questions with answers{new}: name some of {', '.join(GENERATED)}, or a file of them")
    return found
