"""The requests that a server answers: their fields, checked by pydantic, and the fields that it would ignore."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving.response import ResponseHandler

from ..core.checks import printable

DEFAULT_NEW_TOKENS = 1024  # as in transformers' server

# Fields that do not affect the answer. Usage is reported whatever `stream_options` says.
LABELS = ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
          "stream_options", "user")  # fmt: skip
_ABOUT_TOOLS = ("parallel_tool_calls", "tool_choice")
_PLAIN_TEXT = {"type": "text"}
_ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {  # OpenAI's defaults, which are the behaviour here
    **dict.fromkeys(("background", "echo", "logprobs"), (False,)),
    **dict.fromkeys(("best_of", "n"), (1,)),
    **dict.fromkeys(("functions", "include"), ([],)),
    **dict.fromkeys(("presence_penalty", "top_logprobs"), (0,)),
    "modalities": (["text"],), "parallel_tool_calls": (True,), "reasoning": ({},), "response_format": (_PLAIN_TEXT,),
    "service_tier": ("auto", "default"), "store": (False, True), "suffix": ("",),
    "text": ({"format": _PLAIN_TEXT}, {}, {"format": _PLAIN_TEXT, "verbosity": "medium"}),
    "tool_choice": ("auto",), "truncation": ("disabled",), "verbosity": ("medium",),
}  # fmt: skip
_NO_SETTING = ("_from_model_config", "transformers_version", "max_length")  # of a generation config, ignored
MOST_BIASED = 1024  # tokens of `logit_bias`
MOST_CHOICES = 16


def refused(param: str | None, message: str, status: int = 400) -> HTTPException:
    """Returns the error of a request whose field `param` is wrong."""
    return HTTPException(status, {"message": message, "param": param})  # type: ignore[arg-type]


def _text_as(make: Callable[[str], list[Any]]) -> BeforeValidator:
    """Takes a text for the list that `make` makes of it."""
    return BeforeValidator(lambda value: make(value) if isinstance(value, str) else value)


_AS_PARTS = _text_as(lambda text: [{"type": "text", "text": text}])
_PARSED = BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
Whole = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0, lt=2**31)]  # ids of tokens too
Tokens = Annotated[list[Count], Field(fail_fast=True, max_length=MOST_BIASED)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Above = Annotated[Number, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Part(BaseModel):
    """A part of a message; other kinds, such as images, are refused."""

    model_config = ConfigDict(strict=True)
    type: Literal["text", "input_text", "output_text"]
    text: str


Arguments = Annotated[dict[str, Any], _PARSED]  # templates iterate them as a mapping
Content = Annotated[list[Part], Field(fail_fast=True), _AS_PARTS]


class Function(_Strict):
    name: Name
    arguments: Arguments


class ToolCall(_Strict):
    function: Function


class Message(_Strict):
    """A turn of a conversation. Fields that are not listed reach the chat template unchanged."""

    role: Name
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("expected `content`, a text or a list of text parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the message for the chat template, with its text in one piece."""
        return {**self.model_dump(exclude_none=True), "content": _joined(self.content)}


class ItemPart(Part):
    type: Literal["text", "input_text", "output_text", "reasoning_text"]  # type: ignore[assignment]


class Item(_Strict):
    """An item of `/v1/responses`: a message or a part of one, the thoughts before it, a tool's call or its result."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "text", "input_text", "output_text"
    ] = "message"
    role: Name | None = None
    content: Annotated[list[ItemPart], Field(fail_fast=True), _AS_PARTS] | None = None
    text: str | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Arguments | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Item:
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
                  "function_call_output": ("call_id", "output"), "reasoning": ()}.get(self.type, ("text",))  # fmt: skip
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"an item of type {self.type!r} has to have `{missing[0]}`")
        return self


def messages_of(items: list[Item]) -> list[dict[str, Any]]:
    """Returns the messages of `/v1/responses` for the chat template."""
    found: list[dict[str, Any]] = []
    thoughts: dict[str, Any] = {}
    for item in items:
        if item.type == "reasoning":
            thoughts = {"reasoning_content": _joined(item.content, "")}
        elif item.type == "message":
            own = thoughts if item.role == "assistant" else {}
            found.append({"role": item.role, "content": _joined(item.content), **own})
            thoughts = {} if own else thoughts
        elif item.type == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": "", **thoughts})
            call = {"name": item.name, "arguments": item.arguments}
            calls = found[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
        elif item.type == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += f" {item.text}"
        else:
            found.append({"role": "user", "content": item.text})
    return found


def _joined(parts: Sequence[Part] | None, by: str = " ") -> str:
    return by.join(part.text for part in parts or ())


class Tool(_Strict):
    type: Literal["function"]


class Generation(BaseModel):
    """Fields of a generation config that choose or end tokens. Others could compile, or read and write files."""

    model_config = ConfigDict(strict=True, extra="forbid")
    do_sample: bool | None = None
    temperature: Above | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_h: Share | None = None
    typical_p: Annotated[Share, Field(gt=0)] | None = None
    epsilon_cutoff: Annotated[Share, Field(lt=1)] | None = None
    eta_cutoff: Annotated[Share, Field(lt=1)] | None = None
    repetition_penalty: Above | None = None
    no_repeat_ngram_size: Count | None = None
    max_new_tokens: Whole | None = None
    min_new_tokens: Count | None = None
    num_beams: Whole | None = None
    length_penalty: Number | None = None
    early_stopping: bool | Literal["never"] | None = None
    eos_token_id: Count | Tokens | None = None
    pad_token_id: Count | None = None
    bos_token_id: Count | None = None
    suppress_tokens: Tokens | None = None
    begin_suppress_tokens: Tokens | None = None
    bad_words_ids: Annotated[list[Tokens], Field(fail_fast=True, max_length=MOST_BIASED)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, value: Any) -> Any:
        """`transformers chat` sends a whole configuration, most of it `None`."""
        if not isinstance(value, dict):
            return value
        defaults = GenerationConfig().to_dict()
        said = {name: each for name, each in value.items() if each is not None and name not in _NO_SETTING}
        return {name: each for name, each in said.items() if name in cls.model_fields or defaults.get(name) != each}


class Asked(_Strict):
    """Fields that all routes have, and the checks and the configuration that follow from them."""

    limit_name: ClassVar[str] = "max_tokens"
    stream_end: ClassVar[str] = "data: [DONE]\n\n"
    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    generation_config: Annotated[Generation, _PARSED] | None = None

    def check_ignored(self) -> None:
        """Raises an HTTPException (400) for a field that would be ignored."""
        tools = bool(getattr(self, "tools", None))
        for name, value in (self.model_extra or {}).items():
            if value is None or name in LABELS or (name in _ABOUT_TOOLS and not tools):
                continue
            nothing = _ASK_FOR_NOTHING.get(name, ())
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in nothing):
                expected = "".join(f"expected {json.dumps(each)}, or " for each in nothing[:1])
                raise refused(
                    printable(name, 60),
                    f"`{printable(name, 60)}` is not supported here, found {printable(repr(value))}: {expected}leave "
                    f"it out. This route answers to {', '.join(sorted(type(self).model_fields))}",
                )

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens, `None` if the request does not say."""
        return getattr(self, self.limit_name)

    @property
    def choices(self) -> int:
        """Number of answers."""
        return getattr(self, "n", None) or 1

    @property
    def top(self) -> int | None:
        """Number of most probable tokens to report at each place, `None` for no log-probabilities."""
        return None

    def stops(self) -> list[str]:
        return list(getattr(self, "stop", None) or ())

    def config(self, own: Any, room: int, most_beams: int, vocabulary: int) -> Any:
        """Returns the generation config of the request for a model whose `own` it is.

        `room` is the number of tokens that fit behind the prompt. Raises an HTTPException (400) if a field is wrong.
        """
        config = copy.deepcopy(own)
        if self.generation_config is None:
            config.max_new_tokens = max(config.max_new_tokens or 0, DEFAULT_NEW_TOKENS)
            config.do_sample = bool(self.temperature) or (config.do_sample and self.temperature is None)
        else:
            options = self.generation_config.model_dump(exclude_none=True)
            _check_tokens(options, vocabulary)
            config = GenerationConfig(**{"max_new_tokens": DEFAULT_NEW_TOKENS, **options})
            config.do_sample = config.do_sample and self.temperature != 0
        if (config.num_beams or 1) > most_beams:
            raise refused("generation_config", f"`num_beams` is {config.num_beams}: expected at most {most_beams}")
        if (config.num_beams or 1) > 1 and self.top is not None:
            raise refused("logprobs", f"`logprobs` is not supported with beams, found `num_beams` {config.num_beams}")
        if (config.num_beams or 1) > 1 and getattr(self, "schema_text", None) is not None:  # xgrammar follows no beams
            found = f"found `num_beams` {config.num_beams}"
            raise refused("response_format", f"`response_format` is not supported with beams, {found}")
        penalty, bias = (getattr(self, name, None) for name in ("frequency_penalty", "logit_bias"))
        told: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": self.limit}
        told["repetition_penalty"] = None if penalty is None else 1.0 + penalty
        if bias:
            tokens = [int(token) for token in bias]
            _check_tokens({"logit_bias": tokens}, vocabulary, "logit_bias")
            told["sequence_bias"] = {(token,): float(by) for token, by in zip(tokens, bias.values(), strict=True)}
        for name, value in told.items():
            if value is not None:
                setattr(config, name, value)
        config.max_new_tokens = min(config.max_new_tokens, room)
        return config


def _check_tokens(options: Mapping[str, Any], vocabulary: int, param: str = "generation_config") -> None:
    """Raises an HTTPException (400) for ids that are no tokens; on a GPU they would end the process."""
    for name, value in options.items():
        if name.endswith(("_tokens", "_id", "_ids", "_bias")) and "new" not in name:
            rows = value if isinstance(value, list) else [value]
            ids = [token for row in rows for token in (row if isinstance(row, list) else [row])]
            if any(token >= vocabulary for token in ids):
                raise refused(param, f"`{name}` holds {max(ids)}, which is no token: expected ids below {vocabulary}")


_Penalty = Annotated[float, Field(gt=-1, le=2)] | None
_Id = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Bias = Annotated[dict[_Id, Number], Field(max_length=MOST_BIASED)] | None
_Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None
_Stop = Annotated[list[Name], Field(fail_fast=True, min_length=1), _text_as(lambda text: [text])] | None


class Chatting(Asked):
    """Fields of routes that use the chat template."""

    chat_param: ClassVar[str]  # the field with the conversation
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> list[dict[str, Any]]:
        """Returns the messages for the chat template."""
        raise NotImplementedError

    def nested_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools for the chat template, `None` for none."""
        return ResponseHandler._normalize_tools([tool.model_dump() for tool in self.tools or ()]) or None


class Schema(_Strict):
    content: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """Form of an answer: any text, a JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected `json_schema` with the type 'json_schema', and with no other")
        return self


class ChatRequest(Chatting):
    """`/v1/chat/completions`."""

    chat_param = "messages"
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    frequency_penalty: _Penalty = None
    logit_bias: _Bias = None
    stop: _Stop = None
    n: _Choices = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def schema_text(self) -> str | None:
        """JSON schema of the answer; None where any text may be the answer."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return json.dumps({"type": "object"} if form.json_schema is None else form.json_schema.content)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "`top_logprobs` needs `logprobs`: expected true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


class TextRequest(Asked):
    """`/v1/completions`."""

    prompt: Name
    max_tokens: Whole | None = None
    frequency_penalty: _Penalty = None
    logit_bias: _Bias = None
    stop: _Stop = None
    n: _Choices = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | Literal[False] | None = None

    @property
    def top(self) -> int | None:
        return None if self.logprobs is None or self.logprobs is False else self.logprobs


class ResponsesRequest(Chatting):
    """`/v1/responses`; `instructions` replace the system message."""

    limit_name, chat_param, stream_end = "max_output_tokens", "input", ""
    input: Annotated[
        list[Item],
        Field(fail_fast=True, min_length=1),
        _text_as(lambda text: [{"role": "user", "content": text}] if text else []),
    ]
    instructions: str | None = None
    max_output_tokens: Whole | None = None

    def chat(self) -> list[dict[str, Any]]:
        messages = messages_of(self.input)
        if not self.instructions:
            return messages
        system = {"role": "system", "content": self.instructions}
        return [system, *messages[messages[0]["role"] == "system" :]] if messages else [system]


class LoadRequest(_Strict):
    """`/load_model`, which `transformers chat` asks first."""

    model: str


def told(error: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the field of a pydantic error, and a message that names it."""
    if error["type"] == "json_invalid":
        return "", f"the body is not JSON: {error['ctx']['error']}, at character {error['loc'][-1]}"
    labels = ("str", "int", "bool", "[key]", "body")  # of unions and dictionaries
    parts = [str(part) for part in error["loc"] if part not in labels and not str(part).startswith(("list[", "lit"))]
    field, said = printable(".".join(parts), 80), str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        return field, f"`{field}` is missing"
    found = "" if error["type"] == "value_error" else f", found {printable(repr(error['input']), 60)}"
    return field, f"`{field}`: {said}{found}" if field else said
