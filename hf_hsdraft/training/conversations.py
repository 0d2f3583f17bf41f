"""Prompts and conversations on disk: JSON lines, one conversation an object."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """User turns still to be answered.

    Attributes:
        key: digest of the turns, the identity that makes answering restartable.
        turns: the user's messages in order.
        category: free label of the source file, `""` if it has none.
    """

    key: str
    turns: tuple[str, ...]
    category: str = ""


@dataclass(frozen=True)
class Conversation:
    """A finished chat: alternating user and assistant messages, answers by the target."""

    messages: tuple[tuple[str, str], ...]

    def as_messages(self) -> list[Message]:
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class TokenizedConversation:
    """Token ids of a chat under the target's template.

    Attributes:
        input_ids: `[length]`, int64.
        answer_mask: `[length]`, bool; True where the token was written by the assistant (its end-of-turn included).
    """

    input_ids: torch.Tensor
    answer_mask: torch.Tensor


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not valid JSON ({error}); expected one object a line"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
            yield number, row


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Reads prompts from a JSONL file in the MT-bench format (`turns`: a list of user messages).

    Lines that already hold `messages` (answered conversations) are skipped; `read_conversations` takes them.

    Raises:
        ValueError: a line is not a JSON object or has neither `turns` nor `messages`.
    """
    path = Path(path)
    prompts = []
    for number, row in _json_lines(path):
        turns = row.get("turns")
        if turns is None and "messages" in row:
            continue
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            found = f"`turns` is {turns!r:.80}" if "turns" in row else f"found keys {sorted(row)}"
            raise ValueError(
                f"{path}, line {number}: expected `turns`, a non-empty list of strings, or `messages`; {found}"
            )
        key = hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]
        prompts.append(Prompt(key, tuple(turns), str(row.get("category", ""))))
    return prompts


def read_conversations(path: str | os.PathLike[str], greedy_only: bool = False) -> list[Conversation]:
    """Reads finished conversations (`messages`: objects with `role` and `content`) from a JSONL file.

    Args:
        greedy_only: leaves out lines whose `temperature` is above 0.

    Raises:
        ValueError: a line is malformed, or a conversation has no assistant message to learn from.
    """
    path = Path(path)
    conversations = []
    for number, row in _json_lines(path):
        messages = row.get("messages")
        if (messages is None and "turns" in row) or (greedy_only and row.get("temperature", 0) > 0):
            continue
        try:
            pairs = tuple((str(message["role"]), str(message["content"])) for message in messages or ())
        except (TypeError, KeyError):
            raise ValueError(f"{path}, line {number}: each message needs `role` and `content`") from None
        if not any(role == "assistant" for role, _ in pairs):
            raise ValueError(f"{path}, line {number}: no assistant message, nothing to learn from")
        conversations.append(Conversation(pairs))
    return conversations


def tokenize_conversation(tokenizer: Any, conversation: Conversation, max_length: int) -> TokenizedConversation:
    """Renders a conversation with the target's chat template and marks what the assistant wrote.

    The mask comes from rendering the prefixes of the conversation: what a reply adds after the generation prompt is the
    assistant's. That works with every template whose rendering of a prefix is a prefix of the whole.

    Args:
        max_length: tokens kept; the tail of longer conversations is cut.

    Raises:
        ValueError: the template renders a prefix differently once more messages follow.
    """
    messages = conversation.as_messages()
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
