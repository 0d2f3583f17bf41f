"""Prompts and conversations: in files of JSON lines, one object a line, in data sets, in folders of runs; as tokens."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..files import RowFolder

Message = dict[str, Any]
_TEMPLATE_FIELDS = ("tools", "documents")  # of a row, beside `messages`: arguments of the chat template
_SAID = (("tool_calls", "function_call"), ("reasoning_content", "reasoning", "thinking"))  # fields besides `content`
_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question", "text")


@dataclass(frozen=True)
class Prompt:
    """User turns without answers yet.

    By `key`, a digest of the turns, a restarted run knows what is answered. `category` is the label in the source file.
    """

    key: str
    turns: tuple[str, ...]
    category: str = ""
    answers: ClassVar[Sequence[str]] = ()  # as a `Conversation` has

    @classmethod
    def of(cls, turns: Sequence[str], category: str = "") -> Prompt:
        return cls(hashlib.sha256(json.dumps(list(turns)).encode()).hexdigest()[:16], tuple(turns), category)


@dataclass(frozen=True)
class Conversation:
    """A finished chat, answered by the target."""

    messages: tuple[Message, ...]  # messages as they were given, for the chat template
    template: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the chat template, such as `tools`
    place: str = field(default="", compare=False)  # file and line, for errors; empty for none
    category: str = field(default="", compare=False)  # the label in the source file

    @classmethod
    def of(cls, messages: Any, template: Mapping[str, Any] | None = None) -> Conversation:
        """Takes a list of messages, unchanged.

        Raises a ValueError: a message has no `role` or nothing else, or none is the assistant's.
        """
        said = isinstance(messages, list | tuple) and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and any(value is not None for name, value in message.items() if name != "role")
            for message in messages
        )
        if not said:
            raise ValueError("each message needs `role` and `content`, a text, or another field of the chat template")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no assistant message, nothing to learn from")
        return cls(tuple(messages), template or {})

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Conversation:
        """Takes `messages` of a row, and its `tools`, `documents` and `chat_template_kwargs`."""
        further = row.get("chat_template_kwargs") or {}
        if not isinstance(further, dict):
            raise ValueError(f"expected `chat_template_kwargs` to be an object; found {further!r:.80}")
        given = {name: row[name] for name in _TEMPLATE_FIELDS if row.get(name)}
        return cls.of(row["messages"], {**given, **further})

    @property
    def key(self) -> Any:
        """What tells conversations apart: pairs of role and content where there is nothing more."""
        plain = all(message.keys() == {"role", "content"} for message in self.messages) and not self.template
        pairs = tuple((message["role"], message.get("content")) for message in self.messages)
        return pairs if plain else (self.messages, self.template)

    @property
    def turns(self) -> Sequence[str]:
        """The texts of the user's messages."""
        return self._texts("user")

    @property
    def answers(self) -> Sequence[str]:
        """The texts of the assistant's messages."""
        return self._texts("assistant")

    def _texts(self, role: str) -> list[str]:
        return [_text(message.get("content")) for message in self.messages if message["role"] == role]

    def first_request(self, tokenizer: Any) -> str:
        """Returns the messages up to the user's first in the tokenizer's chat template, ready for an answer."""
        first = next(index for index, message in enumerate(self.messages) if message["role"] == "user")
        return self.rendered(tokenizer, first + 1, add_generation_prompt=True)

    def rendered(self, tokenizer: Any, until: int | None = None, **options: Any) -> str:
        """Returns the first `until` messages in the tokenizer's chat template.

        Raises a ValueError: the template cannot render them.
        """
        return _rendered(tokenizer, self.messages[:until], {**self.template, **options})


def _rendered(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # templates raise whatever their code raises
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template cannot render these messages ({told:.200})") from None


def _text(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


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
    path: str | os.PathLike[str],
    greedy_only: bool = False,
    on_bad_line: OnBadLine | None = None,
    check: Callable[[Conversation], object] | None = None,
) -> tuple[list[Conversation], list[Prompt]]:
    """Reads finished conversations and prompts from a file with one JSON object a line.

    An object has `turns`, user messages to answer (the format of MT-bench), or `messages`, a finished conversation,
    with `tools`, `documents` and `chat_template_kwargs` for the chat template.

    Args:
        greedy_only: whether conversations with a `temperature` above 0 are left out.
        on_bad_line: called with a message about each line that cannot be used; `None` raises an error instead.
        check: raises a ValueError for a conversation that cannot be used.

    Raises a ValueError: a line cannot be used. The message names file and line.
    """
    found = list(read_rows(path, on_bad_line, check))
    chats = [
        chat
        for row, chat in found
        if isinstance(chat, Conversation) and not (greedy_only and float(row.get("temperature") or 0.0))
    ]
    return chats, [prompt for _, prompt in found if isinstance(prompt, Prompt)]


def read_rows(
    path: str | os.PathLike[str],
    on_bad_line: OnBadLine | None = None,
    check: Callable[[Conversation], object] | None = None,
) -> Iterator[tuple[dict[str, Any], Conversation | Prompt]]:
    """Yields each line's object with its conversation or prompt, see `read_jsonl`.

    Instead of a file, `path` may be a folder of rows, as `hsdraft train` makes in `data`, or the folder of a run.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is no file or folder {place}")
    if place.is_dir():
        inner = place / "data" if list((place / "data" / "data").glob("*.parquet")) else place
        yield from ((row, Conversation.of_row(row)) for row in RowFolder(inner).rows() if row.get("messages"))
        return
    with place.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            here = f"{path}, line {number}"
            try:
                row, found = _parse(line)
                if isinstance(found, Conversation) and check is not None:
                    check(found)
            except ValueError as error:
                message = f"{here}: {error}"
                if on_bad_line is None:
                    raise ValueError(message) from None
                on_bad_line(message)
            else:
                yield row, replace(found, place=here) if isinstance(found, Conversation) else found


def _parse(line: bytes) -> tuple[dict[str, Any], Conversation | Prompt]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}); expected one object a line") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 ({error})") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no text; expected valid Unicode") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    if row.get("messages") is not None:
        heat = row.get("temperature")
        try:
            float(0.0 if heat is None else heat)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"expected `temperature` to be a number; found {heat!r:.80}") from None
        return row, Conversation.of_row(row)
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

    Raises a ValueError: there is no such column, or it holds no prompt.
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


def read_chats(path: str | os.PathLike[str]) -> list[Conversation | Prompt]:
    """Reads chats and prompts, see `read_rows`; their category is the line's, or else its `source`.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no chats.
    """
    labelled = ((str(row.get("category") or row.get("source") or ""), found) for row, found in read_rows(path))
    chats = [replace(found, category=label) for label, found in labelled]
    if not chats:
        raise ValueError(f"{path} holds no chats: expected lines with `messages` or `turns`, or a folder of a run")
    return chats


def with_padding(tokenizer: Any) -> Any:
    """Returns the tokenizer, or a copy that pads with the end of text if it has no padding token, as Llama's."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenize_conversation(tokenizer: Any, conversation: Conversation, max_length: int) -> TokenizedConversation:
    """Renders a conversation in the target's template, cut at `max_length` tokens, and marks what the assistant wrote.

    Messages without a text are read and not learned.

    Raises a ValueError: see `render`; the message names file and line.
    """
    try:
        text, spans = render(tokenizer, conversation)
    except ValueError as error:
        raise ValueError(f"{conversation.place}: {error}" if conversation.place else str(error)) from None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = torch.tensor(encoding["input_ids"][:max_length], dtype=torch.long)
    mask = torch.tensor(
        [any(begin <= start and end <= stop for begin, stop in spans) for start, end in encoding["offset_mapping"]],
        dtype=torch.bool,
    )[:max_length]
    return TokenizedConversation(ids, mask)


def render(tokenizer: Any, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
    """Returns a conversation in the chat template, and begin and end of what the assistant wrote.

    Prefixes of the conversation are rendered for that. Templates may write earlier turns differently once others
    follow, as those that drop earlier reasoning do: such turns are read, and what was written last is learned.

    Raises a ValueError: the template raises an error, leaves something out, or writes every answer differently from how
    the assistant began or ended it.
    """
    messages, text, spans, changed = conversation.messages, conversation.rendered(tokenizer), [], False
    _check_said(tokenizer, conversation, text)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = conversation.rendered(tokenizer, index, add_generation_prompt=True)
        through = conversation.rendered(tokenizer, index + 1).rstrip()
        if not (text.startswith(before) and text.startswith(through)):
            changed = True
        elif through.split() != _or_nothing(tokenizer, conversation, [*messages[:index], _SILENT]).split():
            spans.append((len(before), len(through)))
    if changed and not spans:
        raise ValueError(
            "the chat template writes each answer differently from how the assistant began or ended it, so the "
            f"assistant's tokens cannot be located; {_REMEDY}"
        )
    return text, spans


_SILENT: Message = {"role": "assistant", "content": ""}


def _or_nothing(
    tokenizer: Any,
    conversation: Conversation,
    messages: Sequence[Message] | None = None,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Renders a changed conversation; an empty text if the template cannot."""
    changed = conversation.template if template is None else template
    try:
        return _rendered(tokenizer, conversation.messages if messages is None else messages, changed)
    except ValueError:
        return ""


def _check_said(tokenizer: Any, conversation: Conversation, text: str) -> None:
    """Raises a ValueError if the template leaves out a message, a part, a field that says something, or an argument."""
    ask, messages = functools.partial(_or_nothing, tokenizer, conversation), conversation.messages
    for name in conversation.template.keys() & set(_TEMPLATE_FIELDS):
        if ask(template={key: value for key, value in conversation.template.items() if key != name}) == text:
            raise ValueError(f"the chat template leaves `{name}` out; {_REMEDY}")
    for index, message in enumerate(messages):
        here, own = f"message {index + 1} ({message['role']})", _text(message.get("content")).strip()
        if own and own not in text and ask([*messages[:index], *messages[index + 1 :]]) == text:
            raise ValueError(f"the chat template leaves {here} out; {_REMEDY}")
        if isinstance(message.get("content"), list | dict) and str(message["content"]) in text:
            raise ValueError(f"the chat template prints `content` of {here} as data; give a text, or {_REMEDY}")
        through = ""
        for name, less in _with_less(message):
            through = through or ask(messages[: index + 1])
            if through and ask([*messages[:index], less]) == through:
                raise ValueError(f"the chat template leaves `{name}` of {here} out; {_REMEDY}")


def _with_less(message: Message) -> Iterator[tuple[str, Message]]:
    """Yields a message without each of what it says beside a text, with a name for it."""
    for names in _SAID:
        if given := [name for name in names if message.get(name)]:
            yield given[0], {name: value for name, value in message.items() if name not in given}
    parts = message.get("content")
    parts = parts if isinstance(parts, list) else []
    for at, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or part.get("text"):
            yield "content", {**message, "content": [*parts[:at], *parts[at + 1 :]]}


_REMEDY = "use a template that renders it (--chat-template), or leave the line out"


def keeps_turns(tokenizer: Any) -> bool:
    """Whether the template renders earlier turns as before once later ones follow; see `render` for errors."""
    turns = ("user", "Name a colour."), ("assistant", "Blue."), ("user", "And another."), ("assistant", "Green.")
    chat = Conversation.of([{"role": role, "content": text} for role, text in turns])
    return len(render(tokenizer, chat)[1]) == 2
