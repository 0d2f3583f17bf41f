"""Decodes requests on transformers' decoding thread, with fixes that OpenAI's clients rely on.

transformers' server decodes requests sequentially on one thread. Changed here:

- A prompt beyond the context window is refused before decoding, and no answer grows beyond the window.
- The seed of a request is set on the decoding thread, right before its call. transformers sets it when the request
arrives, where it changes the random numbers of the request being decoded.
- A field that transformers would ignore is refused, and a response is streamed only on request.
- A temperature above 0 samples. transformers leaves that to the model's configuration.
- An answer that ends by itself with its last permitted token is not reported as cut.
- A request whose client has disconnected ends at its next token. transformers ends streams only.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from fastapi import HTTPException
from starlette.types import Receive
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
    set_torch_seed,
)
from transformers.generation.streamers import BaseStreamer

from ..runtime.prompt_inputs import end_tokens, room_left

# Which fields of OpenAI's requests are supported. transformers ignores the others, and logs that once.
_SAMPLING = ("model", "stream", "temperature", "top_p", "seed", "generation_config")
CHAT_FIELDS = (*_SAMPLING, "messages", "max_tokens", "max_completion_tokens", "frequency_penalty", "logit_bias", "stop",
               "tools", "chat_template_kwargs")  # fmt: skip
TEXT_FIELDS = (*_SAMPLING, "prompt", "max_tokens", "frequency_penalty", "logit_bias", "stop")
RESPONSE_FIELDS = (*_SAMPLING, "input", "instructions", "max_output_tokens", "tools", "chat_template_kwargs")

# Fields that do not affect the answer. Usage is reported whatever `stream_options` says.
_LABELS = ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
           "stream_options", "user")  # fmt: skip
_ABOUT_TOOLS = ("parallel_tool_calls", "tool_choice")
_PLAIN_TEXT = {"type": "text"}
_ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {  # OpenAI's defaults, which are the behaviour here
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "include": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": (_PLAIN_TEXT,),
    "service_tier": ("auto", "default"),
    "reasoning": ({},),
    "store": (False, True),
    "suffix": ("",),
    "text": ({"format": _PLAIN_TEXT}, {}, {"format": _PLAIN_TEXT, "verbosity": "medium"}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
_seed: ContextVar[int | None] = ContextVar("seed", default=None)  # of the request
CLIENT: ContextVar[Receive | None] = ContextVar("receive", default=None)  # of the request's connection


def check_fields(body: Mapping[str, Any], answered: Collection[str]) -> None:
    """Raises an HTTPException (400) for a field that would be ignored; `answered` are the supported ones."""
    for name, value in body.items():
        if value is None or name in answered or name in _LABELS or (name in _ABOUT_TOOLS and not body.get("tools")):
            continue
        nothing = _ASK_FOR_NOTHING.get(name, ())
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in nothing):
            expected = "".join(f"expected {json.dumps(each)}, or " for each in nothing[:1])
            raise HTTPException(
                400,
                f"`{name}` is not supported here, found {value!r}: {expected}leave it out. "
                f"This route answers to {', '.join(sorted(answered))}",
            )


def _is_bias(item: tuple[Any, Any]) -> bool:
    return str(item[0]).isdecimal() and isinstance(item[1], int | float)


class _OpenAIRequest:
    """Mixin for handlers: interprets fields as OpenAI's clients mean them; `answered` are the supported ones."""

    answered: tuple[str, ...] = ()

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        check_fields(body, self.answered)

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seed, temperature = body.get("seed"), body.get("temperature")
        if not (seed is None or isinstance(seed, int)):
            raise HTTPException(400, f"`seed` has to be a whole number, found {seed!r}")
        if not (temperature is None or (isinstance(temperature, int | float) and temperature >= 0)):
            raise HTTPException(400, f"`temperature` has to be a number of at least 0, found {temperature!r}")
        _seed.set(seed)
        bias = body.get("logit_bias") or {}
        if not (isinstance(bias, dict) and all(map(_is_bias, bias.items()))):
            raise HTTPException(400, f"`logit_bias` has to map token ids to numbers, found {bias!r}")
        body = {**body, "seed": None, "logit_bias": None}
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        if bias:  # transformers supports it for chats only, and takes no integers
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()}
        if body.get("generation_config") is None and temperature:
            config.do_sample = True
        return config


class ChatHandler(_OpenAIRequest, ChatCompletionHandler):
    answered = CHAT_FIELDS

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise HTTPException(400, "`messages` is missing: expected a list of at least one message")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise HTTPException(400, f"a message has to be an object with `role` and `content`, found {message!r}")


class TextHandler(_OpenAIRequest, CompletionHandler):
    answered = TEXT_FIELDS


class ResponsesHandler(_OpenAIRequest, ResponseHandler):
    answered = RESPONSE_FIELDS

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        return await super().handle_request({**body, "stream": bool(body.get("stream"))}, request_id)


class OneTarget(GenerationState):
    def __init__(self) -> None:
        super().__init__()
        self.manager = AnswerManager()

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return self.manager


class AnswerManager(GenerateManager):
    def __init__(self) -> None:
        super().__init__()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends all answers at their next token with an error."""
        self._stopped.set()

    async def idle(self) -> None:
        await self.async_submit(lambda: None)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[asyncio.Queue[Any], Any]:
        answer = _Answer(model, inputs, gen_config, _seed.get(), self._stopped)
        return super().generate_streaming(answer, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[str, int, torch.Tensor]:
        answer = _Answer(model, inputs, gen_config, _seed.get(), self._stopped)
        decoding = super().generate_non_streaming(answer, processor, inputs, gen_config, *args, **kwargs)
        try:
            return await _unless_client_leaves(decoding, answer.cancel)
        except _GenerationCancelled:
            raise HTTPException(499, "the client has left") from None  # nginx's status for it


async def _unless_client_leaves(decoding: Awaitable[Any], cancel: Callable[[], None]) -> Any:
    """Awaits decoding; cancels it if the client disconnects first."""
    receive = CLIENT.get()
    task = asyncio.ensure_future(decoding)
    if receive is not None:
        leaving = asyncio.ensure_future(receive())  # the request has been read, so the next message is a disconnect
        await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            cancel()
        leaving.cancel()
    return await task


class _Answer(BaseStreamer):
    """One request: stands in for the target, and streams the tokens of the call.

    `max_new_tokens` of `config` is reduced to what fits. Raises an HTTPException (400) if the prompt does not fit.
    """

    def __init__(self, target: Any, inputs: Any, config: Any, seed: int | None, stopped: threading.Event) -> None:
        self._target, self._config, self._seed, self._stopped = target, config, seed, stopped
        self._streamer: Any = None
        self._last: int | None = None  # token
        self._cancelled = False
        try:
            room = room_left(target, inputs["input_ids"].shape[-1])
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if config.max_new_tokens is not None:
            config.max_new_tokens = min(room, config.max_new_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def cancel(self) -> None:
        self._cancelled = True

    def generate(self, streamer: Any = None, **kwargs: Any) -> torch.Tensor:
        """Calls the target's `generate`; runs on the decoding thread."""
        if self._seed is not None:
            set_torch_seed(self._seed)
        self._streamer = streamer
        beams = (self._config.num_beams or 1) > 1  # they take no streamer
        try:
            self._check()
            return self._target.generate(streamer=streamer if beams else self, **kwargs)
        except _GenerationCancelled:
            raise
        except Exception as error:
            if streamer is None:
                raise
            # transformers puts the message between quotation marks without escaping it.
            raise RuntimeError(json.dumps(str(error))[1:-1]) from error

    def put(self, value: torch.Tensor) -> None:
        self._check()
        self._last = int(value.flatten()[-1])
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._last in end_tokens(self._target, self._config):
            self._config.max_new_tokens = None  # transformers reports an answer with this many tokens as cut
        if self._streamer is not None:
            self._streamer.end()

    def _check(self) -> None:
        if self._cancelled:
            raise _GenerationCancelled
        if self._stopped.is_set():
            raise RuntimeError("the server was stopped")
