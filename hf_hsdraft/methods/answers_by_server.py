"""Answers to training prompts from an OpenAI-compatible server (vLLM, SGLang, `transformers serve`) with the target."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from threading import Event, Semaphore, Thread
from typing import Any

from ..training.data.conversations import Message, Prompt
from ..training.data.generating import Answered, OnSkip, temperature_of
from ..training.data.plan import TEMPERATURES

# Ways to ask for samples of the whole distribution; the first that the server accepts is used. Without them, servers
# apply the model's own top-k. `transformers serve` refuses `top_k`, and would be greedy at any temperature.
_DIALECTS: tuple[Mapping[str, Any], ...] = (
    {"top_k": -1},
    {"generation_config": json.dumps({"do_sample": True, "top_k": 0})},
    {},
)

# A server that runs the target must give the target's answer to at least one of these. Not to all: where two tokens
# nearly tie, another machine may choose the other.
PROBES = (
    "Write the first line of a poem about rain.",
    "Why is the sky blue?",
    "Invent a name for a shop that sells clocks.",
)
PROBE_TOKENS = 8  # of each answer
_SECONDS = 600.0  # that a request may take


def answer_by_server(
    url: str,
    prompts: Sequence[Prompt],
    *,
    model: str | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    max_new_tokens: int = 256,
    concurrency: int = 16,
    seed: int = 0,
    max_retries: int = 5,
    on_skip: OnSkip = lambda prompt, why: None,
) -> Iterator[Answered]:
    """Lets a server answer prompts, and yields each conversation when it is finished, in no particular order.

    The server is tried at once, with the key in `HSDRAFT_API_KEY`, if there is any. A prompt's temperature and seed
    depend on `seed` and its key alone. Closing the iterator, or an error, drops unfinished conversations. `transformers
    serve --continuous-batching` samples every request as the first one, so use it for greedy answers only.

    Args:
        url: URL of the server, with or without `/v1`.
        prompts: duplicate keys are answered once.
        model: name of the target on the server; `None` for the only model that it lists. `transformers serve` lists no
            folders: pass the path that it was started with.
        temperatures: values to draw each prompt's temperature from; 0 is greedy.
        concurrency: number of conversations at once.
        on_skip: called with each prompt that the server refuses or leaves without an answer, and the reason.

    Raises:
        ImportError: the `openai` package is missing.
        ConnectionError: the server cannot be reached or fails, now or during the iteration.
        ValueError: an argument is out of range, or the server refuses the API key or the model.
    """
    if concurrency < 1 or not temperatures or min(temperatures) < 0:
        raise ValueError(f"expected concurrency >= 1 and temperatures >= 0, found {concurrency=}, {temperatures=}")
    server = _Server(url, model, temperatures, max_new_tokens, max_retries)
    once = {prompt.key: prompt for prompt in prompts}.values()
    drawn = (
        (each, temperature_of(each, temperatures, seed), random.Random(f"{seed} {each.key}").getrandbits(31))
        for each in once
    )
    return _as_they_finish(server, drawn, concurrency, on_skip)


def check_server(url: str, model: str | None, temperatures: Sequence[float], expected: Sequence[str]) -> None:
    """Tries a server before it is needed. See `answer_by_server` for the arguments and the errors.

    A ValueError is raised unless it gives one of the answers `expected`, the target's greedy ones to `PROBES`, of at
    most `PROBE_TOKENS` tokens each.
    """
    server = _Server(url, model, temperatures, PROBE_TOKENS)
    server.check_answers(expected)
    server.client.close()


def _as_they_finish(
    server: _Server, drawn: Iterator[tuple[Prompt, float, int]], concurrency: int, on_skip: OnSkip
) -> Iterator[Answered]:
    cancelled, turn = Event(), Semaphore(concurrency)
    pending: dict[Future[Answered], Prompt] = {}

    def converse(prompt: Prompt, temperature: float, seed: int) -> Answered:
        with turn:
            return server.converse(prompt, temperature, seed, cancelled)

    try:
        while True:
            for prompt, temperature, seed in islice(drawn, 2 * concurrency - len(pending)):
                pending[_started(converse, prompt, temperature, seed)] = prompt
            if not pending:
                return
            done = wait(pending, return_when=FIRST_COMPLETED).done
            for task in sorted(done, key=lambda task: task.exception() is not None):  # answers first, so none is lost
                prompt = pending.pop(task)
                try:
                    answered = task.result()
                except _Refused as refused:
                    on_skip(prompt, str(refused))
                else:
                    yield answered
    finally:
        cancelled.set()
        server.client.close()  # so that no request under way is tried again


def _started(work: Callable[..., Answered], *arguments: Any) -> Future[Answered]:
    """Starts work in a daemon thread: an executor's threads would delay the end of the process."""
    task: Future[Answered] = Future()

    def run() -> None:
        try:
            task.set_result(work(*arguments))
        except BaseException as error:
            task.set_exception(error)

    Thread(target=run, daemon=True).start()
    return task


class _Refused(ValueError):
    """The server refuses this request, and would refuse a retry."""


class _Server:
    """A server that answers. See `answer_by_server` for the arguments and the errors."""

    def __init__(
        self, url: str, model: str | None, temperatures: Sequence[float], max_tokens: int, max_retries: int = 5
    ) -> None:
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError("answers by a server need its client: pip install -e '.[train]' in a checkout") from error
        self._url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1") + "/v1"
        key = (os.environ.get("HSDRAFT_API_KEY") or "EMPTY").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key cannot be sent; expected printable ASCII: correct HSDRAFT_API_KEY")
        self.client = OpenAI(base_url=self._url, api_key=key, max_retries=max_retries, timeout=_SECONDS)
        self._model, self._max_tokens = model, 1
        self._model = model or self._only_model()
        self._dialect = self._accepted_dialect(sorted(set(temperatures)))
        self._max_tokens = max_tokens

    def _only_model(self) -> str:
        """Returns the name of the only model listed; otherwise raises a ValueError with the choices."""
        try:
            names = [entry.id for entry in self._call(self.client.models.list).data]
        except (AttributeError, TypeError):  # the client raises them if a web page answers
            names = []
        if len(names) != 1:
            found = ", ".join(names[:20]) or "none"
            raise ValueError(f"{self._url} lists these models: {found}; expected one: pass the target's as `model`")
        return names[0]

    def _accepted_dialect(self, temperatures: Sequence[float]) -> Mapping[str, Any]:
        """Returns the first dialect that the server accepts at all temperatures; a ValueError if there is none."""
        for self._dialect in _DIALECTS:
            try:
                for temperature in temperatures:
                    self.reply([{"role": "user", "content": "Hello"}], temperature, seed=0)
                return self._dialect
            except _Refused as refused:
                reason = str(refused)
        raise ValueError(f"{self._url} refuses to answer `Hello` as {self._model!r} ({reason}): correct `model`")

    def check_answers(self, expected: Sequence[str]) -> None:
        """Raises a ValueError unless the server gives one of the expected answers to `PROBES`."""
        for prompt, text in zip(PROBES, expected, strict=True):
            found, _ = self.reply([{"role": "user", "content": prompt}], temperature=0.0, seed=0)
            if found == text:
                return
        raise ValueError(
            f"{self._url} does not answer as the target does: to {prompt!r} {self._model!r} says {found!r}, and the "
            f"target {text!r}. Serve the target itself there, with the same chat template and dtype, or name it by "
            "`--server-model`"
        )

    def converse(self, prompt: Prompt, temperature: float, seed: int, cancelled: Event) -> Answered:
        """Answers a prompt turn by turn. See `reply` for the errors."""
        messages: list[Message] = []
        total = 0
        for turn in prompt.turns:
            if cancelled.is_set():
                raise _Refused("cancelled")
            messages.append({"role": "user", "content": turn})
            text, tokens = self.reply(messages, temperature, seed)
            if not text:
                raise _Refused("the answer is empty")
            messages.append({"role": "assistant", "content": text})
            total += tokens
        return Answered(prompt, temperature, messages, total)

    def reply(self, messages: list[Message], temperature: float, seed: int) -> tuple[str, int]:
        """Returns the next message and its number of tokens.

        A refusal of this request is a `_Refused`, of every request a ValueError; a failing server is a ConnectionError.
        """
        sampling = {"seed": seed, "extra_body": self._dialect} if temperature > 0 else {}
        fields = {"temperature": temperature, "top_p": 1.0, "max_tokens": self._max_tokens, **sampling}
        response = self._call(self.client.chat.completions.create, model=self._model, messages=messages, **fields)
        if not getattr(response, "choices", None):
            raise _Refused("the response has no choices")
        tokens = response.usage.completion_tokens if response.usage else 0
        return (response.choices[0].message.content or "").strip(), tokens

    def _call(self, request: Callable[..., Any], **arguments: Any) -> Any:
        import openai

        try:
            return request(**arguments)
        except openai.OpenAIError as error:
            raise self._explained(error) from None  # the error of the server may contain the key

    def _explained(self, error: Any) -> Exception:
        url, status, body = self._url, getattr(error, "status_code", None), getattr(error, "body", None)
        if isinstance(body, dict):
            body = body.get("message") or body.get("detail") or body
        said = " ".join(str(body or error.__cause__ or error).split()).replace(self.client.api_key, "***")[:300]
        if status in (400, 413, 422):
            return _Refused(f"{status}: {said}")
        if status in (401, 403):
            return ValueError(f"{url} refuses the API key ({status}): set HSDRAFT_API_KEY to the server's")
        if status == 404:
            return ValueError(f"{url} has no model {self._model!r} ({said}): pass a name that {url}/models lists")
        if status is None:
            expected = "expected an OpenAI-compatible server: start one, as `hsdraft serve --engine vllm --plain` or "
            expected += "`vllm serve MODEL` does, or correct the url"
            return ConnectionError(f"no answer from {url} ({said}); {expected}")
        return ConnectionError(f"{url} keeps failing ({status}: {said}): see the server's log and run again")
