"""Reads chats as texts, from JSONL files and from the folders that runs make, to inspect data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conversations import Conversation, Prompt, read_rows
from .dataset import RowFolder


@dataclass(frozen=True)
class Chat:
    """The user's turns and the assistant's of a chat; a prompt has no answers. `kind` is a label, `""` for none."""

    asked: tuple[str, ...]
    answers: tuple[str, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, found: Conversation | Prompt, kind: str = "") -> Chat:
        if isinstance(found, Prompt):
            return cls(found.turns, (), kind or found.category)
        said = {role: tuple(text for who, text in found.messages if who == role) for role in ("user", "assistant")}
        return cls(said["user"], said["assistant"], kind)


def read_chats(path: str | os.PathLike[str]) -> list[Chat]:
    """Reads chats and prompts.

    Args:
        path: a JSONL file whose lines hold `messages` or `turns`; a folder of rows, as `hsdraft train` makes in `data`;
            or the folder of a run.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no chats.
    """
    chats = [Chat.of(found, _label(row)) for row, found in _rows_of(Path(path))]
    if not chats:
        raise ValueError(f"{path} holds no chats: expected lines with `messages` or `turns`, or a folder of a run")
    return chats


def read_answered(path: str | os.PathLike[str]) -> list[Conversation]:
    """Reads the finished chats of what `read_chats` reads, with the same errors."""
    chats = [found for _, found in _rows_of(Path(path)) if isinstance(found, Conversation)]
    if not chats:
        raise ValueError(f"{path} holds no answers: expected lines with `messages`, or a folder of a run")
    return chats


def _rows_of(place: Path) -> Iterator[tuple[dict[str, Any], Conversation | Prompt]]:
    if not place.exists():
        raise FileNotFoundError(f"there is no file or folder {place}")
    if not place.is_dir():
        yield from read_rows(place)
        return
    inner = place / "data" if list((place / "data" / "data").glob("*.parquet")) else place
    for row in RowFolder(inner).rows():
        if row.get("messages"):
            yield row, Conversation.of(row["messages"])


def _label(row: dict[str, Any]) -> str:
    return str(row.get("category") or row.get("source") or "")
