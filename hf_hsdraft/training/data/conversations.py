"""Prompts and conversations: in files of JSON lines, one object a line, in data sets, in folders of runs; as tokens."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .dataset import RowFolder

Message = dict[str, str]
_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question", "text")


@dataclass(frozen=True)
class Prompt:
    """User turns without answers yet.

    By `key`, a digest of the turns, a restarted run knows what is answered. `category` is the label in the source file.
    """

    key: str
    turns: tuple[str, ...]
    category: str = ""

    @classmethod
    def of(cls, turns: Sequence[str], category: str = "") -> Prompt:
        return cls(hashlib.sha256(json.dumps(list(turns)).encode()).hexdigest()[:16], tuple(turns), category)


@dataclass(frozen=True)
class Conversation:
    """A finished chat, answered by the target: role and content of each message."""

    messages: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, messages: Any) -> Conversation:
        """Converts a list of messages.

        Raises:
            ValueError: a message lacks `role` or text in `content`, or none is the assistant's.
        """
        try:
            pairs = tuple((str(message["role"]), _text(message["content"])) for message in messages or ())
        except (TypeError, KeyError):
            raise ValueError("each message needs `role` and `content`, a text or a list of texts") from None
        if not any(role == "assistant" for role, _ in pairs):
            raise ValueError("no assistant message, nothing to learn from")
        return cls(pairs)


def _text(content: Any) -> str:
    """Returns the text of a message, whose content may be a list of texts; a KeyError for other parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


@dataclass(frozen=True)
class TokenizedConversation:
    """Token ids of a chat in the target's template, `[length]`, int64.

    `answer_mask`, bool, is True where the assistant wrote the token, ends of turn included.
    """

    input_ids: torch.Tensor
    answer_mask: torch.Tensor


OnBadLine = Callable[[str], None]


def read_prompts(path: str | os.PathLike[str], on_bad_line: OnBadLine | None = None) -> list[Prompt]:
    return read_jsonl(path, on_bad_line=on_bad_line)[1]


def read_jsonl(
    path: str | os.PathLike[str], greedy_only: bool = False, on_bad_line: OnBadLine | None = None
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads finished conversations and prompts from a file with one JSON object a line.

    An object has `turns`, user messages to answer (the format of MT-bench), or `messages`, a finished conversation.

    Args:
        greedy_only: whether conversations with a `temperature` above 0 are left out.
        on_bad_line: called with a message about each line that cannot be used; `None` raises an error instead.

    Raises:
        ValueError: a line cannot be used. The message names file and line.
    """
    found = list(read_rows(path, on_bad_line))
    chats = [
        chat
        for row, chat in found
        if isinstance(chat, Conversation) and not (greedy_only and float(row.get("temperature") or 0.0))
    ]
    return chats, [prompt for _, prompt in found if isinstance(prompt, Prompt)]


def read_rows(
    path: str | os.PathLike[str], on_bad_line: OnBadLine | None = None
) -> Iterator[tuple[dict[str, Any], Conversation | Prompt]]:
    """Yields each line's object with its conversation or prompt, see `read_jsonl`."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _parse(line)
            except ValueError as error:
                message = f"{path}, line {number}: {error}"
                if on_bad_line is None:
                    raise ValueError(message) from None
                on_bad_line(message)


def _parse(line: str) -> tuple[dict[str, Any], Conversation | Prompt]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}); expected one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    if row.get("messages") is not None:
        float(row.get("temperature") or 0.0)  # raises a ValueError
        return row, Conversation.of(row["messages"])
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        found = f"`turns` is {turns!r:.80}" if "turns" in row else f"found keys {sorted(row)}"
        raise ValueError(f"expected `turns`, a non-empty list of strings, or `messages`; {found}")
    return row, Prompt.of(turns, str(row.get("category", "")))


def prompts_from_dataset(
    name: str, config: str | None = None, split: str = "train", column: str | None = None
) -> list[Prompt]:
    """Reads the user turns of a data set. Its answers are not used: the target makes its own.

    Args:
        name: name of a data set on the Hub, or a local folder that `datasets` reads.
        column: column that holds a prompt (text), a list of user turns, or chat messages (`role`/`content` or
            `from`/`value`); `None` for the first column with a usual name.

    Raises:
        ValueError: there is no such column, or it holds no prompt.
    """
    from datasets import load_dataset, load_from_disk

    saved = Path(name)
    if (saved / "state.json").is_file():  # written by `save_to_disk`
        rows = load_from_disk(name)
    elif (saved / "dataset_dict.json").is_file():
        rows = load_from_disk(name)[split]
    else:
        rows = load_dataset(name, config, split=split)
    chosen = column or next((usual for usual in _COLUMNS if usual in rows.column_names), None)
    if chosen is None or chosen not in rows.column_names:
        raise ValueError(
            f"{name} has no column {column or ' or '.join(_COLUMNS)!r}; name one with --dataset-column: "
            f"{', '.join(rows.column_names)}"
        )
    prompts = [Prompt.of(turns, str(name)) for value in rows[chosen] if (turns := _user_turns(value))]
    if not prompts:
        raise ValueError(f"column {chosen!r} of {name} holds no prompts: expected text, turns or chat messages")
    return prompts


def _user_turns(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence):
        return []
    turns = []
    for turn in value:
        if isinstance(turn, dict):
            role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
            if role in ("user", "human") and isinstance(text, str):
                turns.append(text)
        elif isinstance(turn, str):
            turns.append(turn)
    return [turn.strip() for turn in turns if turn.strip()]


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
    rows = _rows_of(Path(path))
    chats = [Chat.of(found, str(row.get("category") or row.get("source") or "")) for row, found in rows]
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


def with_padding(tokenizer: Any) -> Any:
    """Returns the tokenizer, or a copy that pads with the end of text if it has no padding token, as Llama's."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenize_conversation(tokenizer: Any, conversation: Conversation, max_length: int) -> TokenizedConversation:
    """Renders a conversation in the target's template, cut at `max_length` tokens, and marks what the assistant wrote.

    Prefixes of the conversation are rendered for the mask. A template that renders earlier messages differently once
    others follow is a ValueError.
    """
    messages = [{"role": role, "content": content} for role, content in conversation.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        through = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not text.startswith(before) or not text.startswith(through.rstrip()):
            raise ValueError(
                "the chat template renders earlier turns differently once later turns follow, so the assistant's "
                "tokens cannot be located; train on single-turn conversations with this target"
            )
        spans.append((len(before), len(through.rstrip())))
    ids = torch.tensor(encoding["input_ids"][:max_length], dtype=torch.long)
    mask = torch.tensor(
        [any(begin <= start and end <= stop for begin, stop in spans) for start, end in encoding["offset_mapping"]],
        dtype=torch.bool,
    )[:max_length]
    return TokenizedConversation(ids, mask)


def check_template_keeps_turns(tokenizer: Any) -> None:
    """Raises a ValueError if the template renders earlier turns differently once later ones follow."""
    turns = (("user", "Name a colour."), ("assistant", "Blue."), ("user", "And another."), ("assistant", "Green."))
    tokenize_conversation(tokenizer, Conversation(turns), 256)
