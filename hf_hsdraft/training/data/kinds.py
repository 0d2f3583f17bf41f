"""Kinds of prompts that users write, as a table: what they ask for, and about what.

A template is a prompt with `{words}` in braces, which are drawn from `WORDS`, and the same word twice is the same draw.
A template that ends with … is an opening, and the target goes on in the place of the user. `{document}` stands for
texts that the target writes first.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .kind_words import WORDS

GOES_ON = "\u2026"
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Kind:
    """A kind of prompts.

    Attributes:
        name: its name. Each chat stores the name of its kind.
        templates: prompts and openings, drawn from evenly.
        documents: what the target is asked for to write `{document}`, drawn from evenly; empty for no document.
        document_tokens: greatest number of tokens of a document.
        parts: number of documents that are put one after the other, each asked for in another way.
        follow_ups: later messages of the user; empty for a single turn.
        turns: number of follow-ups of a chat, drawn evenly from 1 to this.
        continued: greatest number of tokens that the target adds to an opening.
        temperature: temperature of continuations.
        document_temperature: temperature of documents. Small targets lose the thread at higher ones.
        share: share of the prompts, in relation to those of the other kinds.
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


@dataclass(frozen=True)
class Sketch:
    """A prompt before the target has written its part.

    Attributes:
        text: the first turn. `{document}` is still in it.
        asks: what the target is asked for, one entry for each part of the document.
        goes_on: whether the target continues the text.
        follow_ups: the turns after it.
    """

    text: str
    asks: tuple[str, ...]
    goes_on: bool
    follow_ups: tuple[str, ...]


def sketch(kind: Kind, rng: random.Random) -> Sketch:
    """Draws a prompt of a kind: template, topic and words."""
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
    """Returns a kind whose prompts begin in some ways and go on as the target likes."""
    return Kind("invented", tuple(opening + GOES_ON for opening in openings))


def chosen_kinds(shares: Mapping[str, float]) -> list[Kind]:
    """Returns kinds with their shares.

    Args:
        shares: share of each kind, by name; empty for all kinds evenly.

    Raises:
        ValueError: there is no such kind, or a share is not above 0.
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


_TEXTS = (
    "Write {genre} about {topic}.",
    "Write a long paragraph about {topic}.",
    "Explain {topic} in a few paragraphs.",
    "Tell what happened when {person} tried {activity} {setting}, in a few paragraphs.",
)
_CODE = (
    "Write a {programming} function that {task}. Give only the code.",
    "Write a short {programming} program that {task}. Give only the code, without comments.",
)
_FOLLOW_UPS = (
    "Make it shorter.",
    "Say it again for {reader}.",
    "Give me an example.",
    "Why?",
    "Translate that to {language}.",
    "Write it as a list.",
    "Now make it more {style}.",
    "What did you leave out?",
    "Are you sure about that?",
    "Summarize our conversation in one sentence.",
    "Tell me more about the first point.",
    "What would {role} say?",
    "Turn your answer into {form}.",
    "What should I read next?",
    "How much would that cost?",
)

KINDS: tuple[Kind, ...] = (
    Kind("free", ("…",)),
    Kind(
        "question",
        (
            "What is known about {topic}?", "How does one begin with {activity} {setting}?",
            "Why do people care about {topic}?",
            "What are the {few} worst mistakes in {activity} {setting}?",
            "Give me {few} tips for {activity} {setting}.",
            "Explain {topic} to {reader}.", "Compare {aspect} of {thing} and of {other_thing}.", "What …", "Why …",
            "How can I …",
            "Is it true that …", "What is the difference between …", "Who …", "I am worried about {topic}. …",
        ),
    ),
    Kind(
        "summary",
        (
            "Summarize the following text in {few} sentences:\n\n{document}", "{document}\n\nTL;DR",
            "{document}\n\nSummarize this for {reader}.", "What are the {few} main points of this text?\n\n{document}",
            'Write a title and a one-sentence summary.\n\nText: "{document}"',
            "Here is a text.\n\n---\n{document}\n---\n\nGive me the key points as a list.",
            "Shorten this to about {number} words:\n{document}",
        ),
        documents=_TEXTS,
        document_tokens=384,
    ),
    Kind(
        "document-question",
        (
            "{document}\n\nQuestion: …", "Read the text and answer the question.\n\nText: {document}\n\nQuestion: …",
            "Given the following passage\n\n{document}\n\nanswer this question: …",
            "{document}\n\nAccording to this text, what …", "{document}\n\nWhat does the text say about {aspect}?",
            "Answer from the text alone; say so if it does not tell.\n\n{document}\n\nWhy …",
            "{document}\n\nIs it right that …",
        ),
        documents=_TEXTS,
        document_tokens=320,
        continued=48,
    ),
    Kind(
        "translation",
        (
            "Translate to {language}: {document}", "Translate the following text into {language}:\n\n{document}",
            'How do I say this in {language}?\n"{document}"',
            "{document}\n\nTranslate this from English to {language}.",
            "I need this in {language} and in {other_language}: {document}",
        ),
        documents=(
            "Write two sentences about {topic}.", "Write {message} in three sentences.",
            "Write one sentence about {topic}.",
            "Write a short dialogue of two people about {topic}.", "Write a short paragraph about {topic}.",
        ),
        document_tokens=96,
    ),
    Kind(
        "translation-back",
        (
            "Translate to English: {document}", "What does this mean in English?\n\n{document}",
            "{document}\n\nTranslate this {language} text to English.",
            "Translate from {language} to {other_language}:\n{document}",
        ),
        documents=(
            "Write two sentences about {topic} in {language}. Write only in {language}.",
            "Write {message} of three sentences in {language}. Write only in {language}.",
        ),
        document_tokens=96,
    ),
    Kind(
        "code",
        (
            "Write a {programming} function that {task}.", "How do I write {programming} code that {task}? Explain it.",
            "Write tests for a {programming} function that {task}.",
            "Show me the {few} ways to do this in {programming}: …",
            "Write a {programming} class for {thing} with methods and comments.", "I get an error in {programming}: …",
            "Write a {programming} program that …", "What is the fastest way in {programming} to …",
            "Write an SQL query that …", "Explain the difference in {programming} between …",
        ),
    ),
    Kind(
        "code-given",
        (
            "Explain what this code does:\n\n{document}", "Find and fix the mistakes in this code.\n\n{document}",
            "{document}\n\nWrite tests for it.", "{document}\n\nRewrite this in {programming_goal}.",
            "Add comments and error handling to this code:\n{document}",
            "What is the complexity of this?\n\n{document}",
            "Make this code shorter and easier to read:\n\n{document}", "{document}\n\nWhy does this not work for …",
        ),
        documents=_CODE,
        document_tokens=224,
        continued=48,
    ),
    Kind(
        "extraction",
        (
            "Extract {fields} from the text as JSON.\n\n{document}", "{document}\n\nList all names in this text.",
            "List every date and number in the following text, with what it stands for:\n\n{document}",
            "Turn this into a Markdown table:\n\n{document}",
            "{document}\n\nReturn a JSON array of objects with the keys {fields}, and nothing else.",
            "Make a list of bullet points of the facts in this text.\n\nText: {document}",
            "Which places and organisations are named here? Answer with a comma-separated list.\n{document}",
        ),
        documents=(
            "Write {facts} about {topic}.",
            "Write a short news article about {topic}, with names.",
        ),
        document_tokens=224,
    ),
    Kind(
        "mathematics",
        (
            "{person} has {number} {goods}, buys {second_number} more and gives {third_number} to each of two friends. "
            "How many are left?",
            "A shop sells {goods} at ${second_number} each. {person} buys {third_number} and pays with ${number}00. "
            "How much change is there?",
            "{person} reads {third_number} pages a day. How many days does a book of {number}0 pages take?",
            "What is {number} times {second_number}? Show the steps.",
            "Solve {third_number}x + {second_number} = {number}.",
            "A train covers {number}0 kilometres in {third_number} hours. What is its speed?",
            "What is {second_number}% of {number}0?", "Simplify {number}/{second_number} + {third_number}/{number}.",
            "{person} is {third_number} years older than twice the age of a sister, who is {second_number}. …",
            "{person} and {other_person} share {number}0 {goods}. …", "A rectangle is {number} cm long and …",
            "In a class of {number} pupils, …", "Every week {person} earns ${number}0 and …", "Prove that …",
        ),
        temperature=1.0,
    ),
    Kind(
        "rewriting",
        (
            "Rewrite this so that it is more {style}:\n\n{document}", "Correct grammar and spelling:\n\n{document}",
            "{document}\n\nRewrite it for {reader}.", "Paraphrase the following text: {document}",
            "Make this {style} and at most {number} words long.\n\n{document}", "{document}\n\nTurn this into {form}.",
            "Change this text from the past to the present:\n{document}", "Improve my text: {document}",
        ),
        documents=(
            "Write {message} about {topic}.", "Write a paragraph about {topic}.",
            "Write {opinion} about {thing}.",
        ),
        document_tokens=192,
    ),
    Kind(
        "classification",
        (
            "Is this positive, negative or neutral? Answer with one word.\n\n{document}",
            "{document}\n\nWhich of these fits best: sports, politics, science, business, culture?",
            "Does the writer of this message want a refund? Say yes or no and why.\n\n{document}",
            "Label the text with one of: complaint, question, praise, request.\nText: {document}\nLabel:",
            "{document}\n\nHow urgent is this, from 1 to 5? Explain in one sentence.",
            "Which feelings does the writer show?\n\n{document}", "Is this a fact or an opinion? {document}",
            "Text: {document}\n\nQuestion: is this about {thing}? Answer yes or no.",
            "{document}\n\nIs this about {other_thing}?",
        ),
        documents=(
            "Write {opinion} about {thing}.", "Write {message} about {topic}.",
            "Write {opinion} about {activity} {setting}.",
            "Write one sentence about {topic}.",
        ),
        document_tokens=128,
    ),
    Kind(
        "writing",
        (
            "Write {form} about {topic}.", "Write {message} about {topic}.", "Write {genre} about {topic}.",
            "Write {form} in which {person} and {other_person} argue about {thing}.", "Continue this story: …",
            "Write {form} that begins with: …", "Make an outline for {genre} about {topic}.",
            "Invent {few} names for a company that sells {thing}, with a slogan for each.",
            "Write {opinion} about {thing}.", "Write {form} of at most {number} words about {topic}. Make it {style}.",
        ),
    ),
    Kind(
        "role-play",
        (
            "You are {role}. I ask you about {topic}. What do you say?",
            "Pretend that you are {role} and tell me about {thing}.",
            "Let us play a game: you are {role}, I am {other_role}. You speak first.",
            "Act as {role}. My first question: …",
            "You are {role}. Stay in character. {person}: …",
            "I want you to be {role} who explains {topic} to {reader}.",
            "Answer as {role} would: …",
        ),
    ),
    Kind(
        "conversation",
        (
            "Tell me about {topic}.", "I would like to talk about {topic}.",
            "What do you think of {activity} {setting}?",
            "Write {form} about {thing}.", "Give me {few} ideas for {activity}.", "Hello! …", "Can you help me with …",
            "Write a {programming} function that {task}.", "Explain {thing} to me.",
        ),
        follow_ups=_FOLLOW_UPS,
        turns=3,
        continued=64,
    ),
    Kind(
        "long-context",
        (
            "{document}\n\nSummarize all of this in {few} sentences.",
            "Below are some texts.\n\n{document}\n\nQuestion: …",
            "Read these notes and write {genre} from them.\n\n{document}",
            "{document}\n\nWhat do these texts agree on?",
            "Use the context to answer.\n\nContext:\n{document}\n\nWhat is said about {aspect}?",
            "{document}\n\nGive each part a title, and list its main points.",
            "{document}\n\nTranslate the last paragraph to {language}.",
            "{document}\n\nWhich part is about {aspect}? Repeat its first sentence.",
        ),
        documents=(
            *_TEXTS, "Write {facts} about {topic}.", "What are the advantages and disadvantages of {topic}?",
            "Describe the history of {thing} in several paragraphs.", "Write an interview with {role} about {topic}.",
        ),
        document_tokens=512,
        parts=4,
        continued=48,
    ),
)  # fmt: skip
