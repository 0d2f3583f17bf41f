"""Writes prompts about long documents, for `hsdraft bench`: texts that answers repeat in part.

    python benchmarks/documents.py documents.jsonl

The documents are topics of Python's reference, which comes with every Python (`pydoc_data.topics`). So the prompts are
the same everywhere, up to small changes between versions of Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from runner import options

_ASKED = {
    "summary": "Summarize the following text in a few sentences.\n\n{text}",
    "question": "{text}\n\nAnswer by this text: what are the rules, and when does an error occur?",
    "extraction": "List the technical terms of the following text, each with what the text says of it.\n\n{text}",
}
_RETRIEVAL = "{texts}\n\nWhich of these texts is about {subject}? Quote what it says."
_TOPICS = ("binary", "class", "raise", "with", "exceptions", "dict")
_SHORT_TOPICS = {  # and what they are about
    "global": "the global statement",
    "in": "membership tests",
    "for": "loops",
    "augassign": "augmented assignment",
    "context-managers": "context managers",
    "id-classes": "reserved names",
}


def document_prompts() -> Iterator[dict[str, object]]:
    """Yields prompts: `turns`, a list of one user turn, and `category`."""
    for category, asked in _ASKED.items():
        for topic in _TOPICS:
            yield {"turns": [asked.format(text=topics[topic].strip())], "category": category}
    names = list(_SHORT_TOPICS)
    for place, (topic, subject) in enumerate(_SHORT_TOPICS.items()):
        shown = [topic, names[place - 1], names[place - 2]]
        shown = shown[place % 3 :] + shown[: place % 3]
        texts = "\n\n".join(f"Text {number}:\n{topics[name].strip()}" for number, name in enumerate(shown, 1))
        yield {"turns": [_RETRIEVAL.format(texts=texts, subject=subject)], "category": "retrieval"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("path", type=Path, help="JSONL file to write")
    path = parser.parse_args(arguments).path
    lines = [json.dumps(prompt) + "\n" for prompt in document_prompts()]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} prompts in {path}")


if __name__ == "__main__":
    main()
