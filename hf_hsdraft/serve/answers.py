"""Answers requests by transformers' handlers, on transformers' decoding thread, together or one at a time.

transformers' handlers make the answers of OpenAI's API. What happens before them is done here:

- The prompt is made outside the event loop, and one beyond the context window is refused.
- The seed of a request is set on the decoding thread, right before its call.
- A temperature above 0 samples. transformers leaves that to the model's configuration.
- Decoding ends with the first stop string, and the answer ends before it.
- An answer that ends by itself with its last permitted token is not reported as cut.
- A request whose client has disconnected ends at its next token, as all do when the server stops.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive
from tokenizers.decoders import DecodeStream
from transformers import StoppingCriteria
from transformers.cli.serving.utils import (
    DirectStreamer,
    GenerateManager,
    _GenerationCancelled,
    _StreamError,
    response_events_to_chunks,
    set_torch_seed,
)
from transformers.generation.streamers import BaseStreamer

from ..generate.attachment import Attachment
from ..runtime.prompt_inputs import end_tokens, room_left
from .choices import TokenLogProbs, interleaved, joined
from .guards import RequestLimits, error_document
from .metrics import AnswerClock, Metrics
from .prompts import constraining
from .requests import Asked, Chatting, refused
from .together import Together


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the first stop string in a text begins; `None` if there is none."""
    return min((place for place in map(text.find, stops) if place >= 0), default=None)


class StopWatch(StoppingCriteria):
    """Ends a text with a stop string, of which special tokens may be part, and the call by the error of `check`.

    `prompt` is the number of tokens before the new ones.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: int, check: Callable[[], None]) -> None:
        self._tokenizer, self._stops, self._prompt, self._check = tokenizer, stops, prompt, check
        # A token holds a byte or more, a special one none, and the first may be the end of a character.
        self._reach = max((len(stop.encode()) for stop in stops), default=0) + 16

    def reached(self, ids: Sequence[int]) -> bool:
        """Returns whether the new tokens `ids` of a text, which held no stop string before the last, hold one."""
        tail = ids[-self._reach :]
        return bool(self._stops) and any(
            first_stop(self._tokenizer.decode(tail, skip_special_tokens=skip), self._stops) is not None
            for skip in (True, False)
        )

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._check()
        reached = [self.reached(ids) for ids in input_ids[:, self._prompt :].tolist()]
        return torch.tensor(reached, device=input_ids.device)


class CutStream:
    """A `DecodeStream` that holds back what may become a stop string, and ends before the first one."""

    def __init__(self, stream: Any, stops: Sequence[str]) -> None:
        self._stream, self._stops, self._ended = stream, stops, False
        self.held = ""  # what cannot be shown yet; the rest of a text that has ended

    def step(self, tokenizer: Any, token: int) -> str | None:
        """Returns the text that can be shown after one more token; `None` for none."""
        piece = self._stream.step(tokenizer, token)
        if piece is None or self._ended:
            return None
        text = self.held + piece
        shown = first_stop(text, self._stops)
        self._ended = shown is not None
        if shown is None:  # a stop string may begin at any of the last characters
            longest = max(map(len, self._stops), default=1) - 1
            places = range(max(len(text) - longest, 0), len(text))
            shown = next((at for at in places if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
        self.held = "" if self._ended else text[shown:]
        return text[:shown] or None


class CutTokenizer:
    """Stands in for a tokenizer: answers that it decodes or parses end before the first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._real, self._stops = tokenizer, stops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        text = self._real.decode(*args, **kwargs)
        return text[: first_stop(text, self._stops)]

    def parse_response(self, response: Any, *args: Any, **kwargs: Any) -> Any:
        return self._real.parse_response(self.decode(response), *args, **kwargs)


@dataclass
class Decoder:
    """The one target of a server and the thread that decodes for it; `name` is what clients call it.

    Requests are decoded one after another, unless `together` is given.
    """

    target: Any
    tokenizer: Any
    name: str
    limits: RequestLimits
    thread: GenerateManager = field(default_factory=GenerateManager)
    together: Together | None = None
    attachment: Attachment | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    asked: int = 0  # requests that have not been answered

    def __post_init__(self) -> None:
        self.metrics = Metrics(self)

    @property
    def running(self) -> int:
        """Number of requests that are decoded."""
        return min(self.asked, 1) if self.together is None else self.together.batching.running

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their decoding."""
        return max(self.asked - self.running, 0)

    @property
    def reused_tokens(self) -> int:
        """Number of tokens of prompts that were not read again."""
        return 0 if self.together is None else self.together.batching.reused_tokens

    def decode(self, answer: Answer, streamer: Any) -> Future[Any]:
        """Returns the future output of an answer's call."""
        if self.together is None:
            return self.thread.submit(answer.decode, streamer)
        return self.together.submit(answer.call(streamer), answer.seed, answer.check)

    def check(self, asked: Asked) -> None:
        """Raises an HTTPException for a request that this server cannot answer, or not now."""
        asked.check_ignored()
        if asked.model is not None and asked.model != self.name:
            raise refused("model", f"Server is pinned to '{self.name}'; requested '{asked.model[:200]}'.")
        stops, limits = asked.stops(), self.limits
        if len(stops) > limits.max_stops or any(len(stop) > limits.max_stop for stop in stops):
            most = f"at most {limits.max_stops} texts of {limits.max_stop} characters"
            raise refused("stop", f"`stop` is too long: expected {most}")
        if asked.choices > limits.max_requests:
            raise refused("n", f"`n` is too large: expected at most {limits.max_requests}, found {asked.choices}")
        if self.asked + asked.choices > limits.max_requests:
            raise HTTPException(503, f"{self.asked} requests are being answered: try again later")

    async def respond(
        self, handler: Any, asked: Asked, ids: torch.Tensor, request: Request, grammar: Any = None, **further: Any
    ) -> Response:
        """Answers a request with the prompt `ids` in the form of transformers' `handler`, which takes `further`.

        A compiled `grammar` constrains the answers.
        Raises an HTTPException (400) if the prompt or a setting does not fit.
        """
        try:
            room = room_left(self.target, ids.shape[-1])
        except ValueError as error:
            raise refused("messages", str(error)) from None
        own = self.target.generation_config
        config = asked.config(own, room, self.limits.max_beams, self.target.get_input_embeddings().num_embeddings)
        ids = ids.to(self.target.device)
        made = [Answer(self, asked, ids, copy.copy(config), request.receive) for _ in range(asked.choices)]
        for index, answer in enumerate(made):
            if asked.seed is not None:  # after the greatest seed comes 0
                answer.seed = asked.seed + index - (2**64 if asked.seed + index >= 2**64 else 0)
            answer.processors += constraining(grammar)
        further |= {"request_id": request.state.name, "model": self.target, "model_id": self.name}
        calls = [
            {
                **further,
                "processor": each.tokenizer,
                "inputs": each.inputs,
                "gen_config": each.config,
                "gen_manager": each,
            }
            for each in made
        ]
        if not asked.stream:
            try:
                responses = await asyncio.gather(*(handler._non_streaming(**call) for call in calls))
            finally:
                for answer in made:  # if one has failed
                    answer.cancel()
            if len(made) == 1 and asked.top is None:
                return responses[0]
            return JSONResponse(joined([each.body for each in responses], [each.logprobs for each in made]))
        responses = [handler._streaming(**call) for call in calls]
        responses[0].body_iterator = interleaved([each.body_iterator for each in responses], made, asked.stream_end)
        return responses[0]


class Answer(BaseStreamer):
    """Decodes one request: stands in for the generation manager of transformers' handlers, and streams the call."""

    def __init__(self, decoder: Decoder, asked: Asked, ids: torch.Tensor, config: Any, receive: Receive) -> None:
        self._decoder, self.config, self._receive, self.seed = decoder, config, receive, asked.seed
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        stops = asked.stops()
        self.tokenizer = CutTokenizer(decoder.tokenizer, stops) if stops else decoder.tokenizer
        self._stops, self._watch = stops, StopWatch(decoder.tokenizer, stops, ids.shape[-1], self.check)
        ends, top = end_tokens(decoder.target, config), asked.top
        own = ids.shape[-1], ends, isinstance(asked, Chatting)
        self.logprobs = None if top is None else TokenLogProbs(decoder.tokenizer, top, *own)
        self.processors: list[Any] = [] if self.logprobs is None else [self.logprobs]
        self._streamer: Any = None
        self._new: list[int] = []
        self._clock = AnswerClock(decoder.metrics)
        self._cancelled = False
        self.failure: dict[str, Any] = {}  # document of the error that ended a stream

    def generate_streaming(
        self, *_: Any, response_parser: Any = None, **__: Any
    ) -> tuple[asyncio.Queue[Any], DirectStreamer]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        streamer = _CutStreamer(self._decoder.tokenizer._tokenizer, loop, queue, response_parser, self._stops)

        async def work() -> None:
            try:
                await self._output(streamer)
            except (_GenerationCancelled, asyncio.CancelledError):
                queue.put_nowait(None)
            except Exception as error:
                status, message, _ = told(error)
                self.failure = error_document(status, message)
                queue.put_nowait(_StreamError(message))

        self._work = loop.create_task(work())  # a task that nothing holds may be collected
        return queue, streamer

    async def generate_non_streaming(self, *_: Any, **__: Any) -> tuple[str, int, torch.Tensor]:
        try:
            sequences = await self._output(None)
        except _GenerationCancelled:
            raise HTTPException(499, "the client has left") from None  # nginx's status for it
        length = self.inputs["input_ids"].shape[-1]
        new = sequences[0, length:]
        return self.tokenizer.decode(new, skip_special_tokens=True), length, new

    async def _output(self, streamer: Any) -> torch.Tensor:
        """The output of the call, which ends early if the client leaves; notes times and outcome."""
        leaving, error = asyncio.ensure_future(self._watch_client()), None
        self._decoder.asked += 1
        try:
            output: torch.Tensor = await asyncio.wrap_future(self._decoder.decode(self, streamer))
        except BaseException as raised:
            error = raised
            raise
        finally:
            leaving.cancel()
            self._decoder.asked -= 1
            self._clock.end(error)
        self.of_beams(output)
        return output

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    def cancel(self) -> None:
        """Ends the call at its next token."""
        self._cancelled = True

    def check(self) -> None:
        """Raises an error if the call has to end."""
        if self._cancelled:
            raise _GenerationCancelled
        if self._decoder.stopped.is_set():
            raise HTTPException(503, "the server was stopped")

    def call(self, streamer: Any) -> dict[str, Any]:
        """Returns the arguments of the target's `generate()`."""
        self.check()
        self._streamer = streamer
        streaming = {} if self._has_beams else {"streamer": self}  # beams take none
        rules = {"stopping_criteria": [self._watch], "logits_processor": self.processors}
        return {**self.inputs, "generation_config": self.config, **rules, **streaming}

    def decode(self, streamer: Any) -> torch.Tensor:
        """Calls the target's `generate()`; runs on the decoding thread."""
        call = self.call(streamer)
        if self.seed is not None:
            set_torch_seed(self.seed)
        output: torch.Tensor = self._decoder.target.generate(**call)
        return output

    @property
    def _has_beams(self) -> bool:
        return (self.config.num_beams or 1) > 1

    def of_beams(self, output: torch.Tensor) -> None:
        """Streams what beams have found, once they are done."""
        if self._has_beams:
            self.put(self.inputs["input_ids"][0])
            self.put(output[0, self.inputs["input_ids"].shape[-1] :])
            self.end()

    def put(self, value: torch.Tensor) -> None:
        self.check()
        tokens = value.flatten().tolist()
        if self._new:  # else it is the prompt
            self._clock.note(len(tokens))
            if self.logprobs is not None:
                self.logprobs.note(tokens)
        self._new += tokens
        if self._streamer is not None:
            self._streamer.put(value.cpu())

    def end(self) -> None:
        new = self._new[self.inputs["input_ids"].shape[-1] :]
        if new and (new[-1] in end_tokens(self._decoder.target, self.config) or self._watch.reached(new)):
            self.config.max_new_tokens = None  # transformers reports an answer with this many tokens as cut
        if self._streamer is not None:
            self._streamer.end()


class _CutStreamer(DirectStreamer):
    """transformers' streamer, without stop strings and what follows them."""

    def __init__(self, tokenizer: Any, loop: Any, queue: Any, parser: Any, stops: list[str]) -> None:
        super().__init__(tokenizer, loop, queue, parser)
        self._decode_stream = CutStream(DecodeStream([], skip_special_tokens=parser is None), stops)

    def end(self) -> None:
        if rest := self._decode_stream.held:
            for item in [rest] if self._parser is None else response_events_to_chunks(self._parser.feed(rest)):
                self._enqueue(item)
        super().end()


def told(error: Any) -> tuple[int, str, str | None]:
    """Returns an error's status, its message and the field that it is about."""
    if isinstance(error, HTTPException):
        detail = error.detail if isinstance(error.detail, Mapping) else {"message": str(error.detail)}
        return error.status_code, detail["message"], detail.get("param")
    if isinstance(error, ValueError):
        return 400, str(error), None
    return 500, f"{type(error).__name__}: {error}", None
