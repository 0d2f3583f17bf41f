"""Prompts and conversations on disk: JSON lines, one conversation an object."""

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

    @classmethod
    def of(cls, turns: Sequence[str], category: str = "") -> Prompt:
        return cls(hashlib.sha256(json.dumps(list(turns)).encode()).hexdigest()[:16], tuple(turns), category)


@dataclass(frozen=True)
class Conversation:
    """A finished chat: alternating user and assistant messages, answers by the target."""

    messages: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, messages: Any) -> Conversation:
        """Checks and takes over a list of messages.

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

    def as_messages(self) -> list[Message]:
        return [{"role": role, "content": content} for role, content in self.messages]


def _text(content: Any) -> str:
    """A message's words; content may be a list of parts, of which only texts are understood."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


@dataclass(frozen=True)
class TokenizedConversation:
    """Token ids of a chat under the target's template.

    Attributes:
        input_ids: `[length]`, int64.
        answer_mask: `[length]`, bool; True where the token was written by the assistant (its end-of-turn included).
    """

    input_ids: torch.Tensor
    answer_mask: torch.Tensor


OnBadLine = Callable[[str], None]


def read_prompts(path: str | os.PathLike[str], on_bad_line: OnBadLine | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, see `read_jsonl`."""
    return read_jsonl(path, on_bad_line=on_bad_line)[1]


def read_jsonl(
    path: str | os.PathLike[str], greedy_only: bool = False, on_bad_line: OnBadLine | None = None
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads a file with one JSON object a line: `turns` (user messages to answer, the MT-bench format) or `messages`.

    Args:
        greedy_only: leaves out conversations whose `temperature` is above 0.
        on_bad_line: told of each line that cannot be used, by number, and the others are read; `None` raises instead.

    Returns:
        finished conversations and prompts.

    Raises:
        ValueError: a line is neither; the message names file and line.
    """
    found = list(_parsed_lines(Path(path), _parse, on_bad_line))
    chats = [
        chat for chat, temperature in found if isinstance(chat, Conversation) and not (greedy_only and temperature)
    ]
    return chats, [prompt for prompt, _ in found if isinstance(prompt, Prompt)]


def _parse(row: dict[str, Any]) -> tuple[Conversation | Prompt, float]:
    if row.get("messages") is not None:
        return Conversation.of(row["messages"]), float(row.get("temperature") or 0.0)
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        found = f"`turns` is {turns!r:.80}" if "turns" in row else f"found keys {sorted(row)}"
        raise ValueError(f"expected `turns`, a non-empty list of strings, or `messages`; {found}")
    return Prompt.of(turns, str(row.get("category", ""))), 0.0


def _parsed_lines(path: Path, parse: Callable[[dict[str, Any]], Any], on_bad_line: OnBadLine | None) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield parse(_json_object(line))
            except ValueError as error:
                message = f"{path}, line {number}: {error}"
                if on_bad_line is None:
                    raise ValueError(message) from None
                on_bad_line(message)


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}); expected one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def with_padding(tokenizer: Any) -> Any:
    """The tokenizer, or a copy that pads with the end of the turn where it has no token for padding (Llama's)."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
