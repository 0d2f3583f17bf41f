"""Answers to training prompts from an OpenAI-compatible server (vLLM, SGLang, `transformers serve`) with the target."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from threading import Event
from typing import Any

from .answers import TEMPERATURES, Answered, temperature_of
from .conversations import Message, Prompt

_OnSkip = Callable[[Prompt, str], None] | None

# How to ask for samples of the whole distribution; the first that the server takes is used. Without, servers apply the
# model's own top-k, and `transformers serve`, which refuses `top_k`, is greedy at any temperature.
_DIALECTS: tuple[Mapping[str, Any], ...] = (
    {"top_k": -1},
    {"generation_config": json.dumps({"do_sample": True, "top_k": 0})},
    {},
)


def answer_by_server(
    url: str,
    prompts: Sequence[Prompt],
    *,
    model: str | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    max_new_tokens: int = 256,
    concurrency: int = 16,
    seed: int = 0,
    api_key: str | None = None,
    max_retries: int = 5,
    timeout: float = 600.0,
    on_skip: _OnSkip = None,
) -> Iterator[Answered]:
    """Lets a server answer the prompts and yields each conversation as it finishes, in no particular order.

    Temperature and seed of a prompt follow from `seed` and its key alone. Closing the iterator drops what is not
    finished. `transformers serve --continuous-batching` samples every request like its first: only for greedy answers.

    Args:
        url: where the server listens, with or without `/v1`.
        prompts: answered once per key.
        model: its name on the server, `None` for the only one listed. `transformers serve` lists no folders: pass the
            path it was started with.
        temperatures: drawn from per prompt, 0 meaning greedy; repeat a value to weigh it.
        concurrency: conversations under way at once.
        api_key: `None` for the one in `HSDRAFT_API_KEY`, if any; others are not this server's to see.
        max_retries: of each request, with growing pauses, while the server is busy, failing or out of reach.
        timeout: seconds per request.
        on_skip: called with each prompt that the server refuses or answers with nothing, and the reason.

    Returns:
        The finished conversations, from a server that was found to answer.

    Raises:
        ImportError: the `openai` package is missing.
        ConnectionError: the server is out of reach or fails; also while iterating.
        ValueError: an argument is out of range, or the server refuses the API key or the model.
    """
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ImportError("answers by a server need its client: pip install 'hf-hsdraft[train]'") from error
    if concurrency < 1 or not temperatures or min(temperatures) < 0:
        raise ValueError(f"expected concurrency >= 1 and temperatures >= 0, found {concurrency=}, {temperatures=}")
    base_url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1") + "/v1"
    key = (api_key or os.environ.get("HSDRAFT_API_KEY") or "EMPTY").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the API key cannot be sent; expected printable ASCII: correct HSDRAFT_API_KEY")
    client = OpenAI(base_url=base_url, api_key=key, max_retries=max_retries, timeout=timeout)
    server = _Server(client, base_url, model, max_new_tokens, _DIALECTS[0])
    if model is None:
        server = replace(server, model=server.only_model())
    server = replace(server, dialect=server.find_dialect(sorted(set(temperatures))))
    once = {prompt.key: prompt for prompt in prompts}.values()
    return _as_they_finish(server, (_draw(prompt, temperatures, seed) for prompt in once), concurrency, on_skip)


def _draw(prompt: Prompt, temperatures: Sequence[float], seed: int) -> tuple[Prompt, float, int]:
    return prompt, temperature_of(prompt, temperatures, seed), random.Random(f"{seed} {prompt.key}").getrandbits(31)


def _as_they_finish(
    server: _Server,
    drawn: Iterator[tuple[Prompt, float, int]],
    concurrency: int,
    on_skip: Callable[[Prompt, str], None] | None,
) -> Iterator[Answered]:
    cancelled = Event()
    pool = ThreadPoolExecutor(concurrency)
    pending: dict[Future[Answered], Prompt] = {}
    try:
        while True:
            for prompt, temperature, seed in islice(drawn, 2 * concurrency - len(pending)):
                pending[pool.submit(server.converse, prompt, temperature, seed, cancelled)] = prompt
            if not pending:
                return
            done = wait(pending, return_when=FIRST_COMPLETED).done
            for task in sorted(done, key=lambda task: task.exception() is not None):  # what is answered is not lost
                prompt = pending.pop(task)
                try:
                    answered = task.result()
                except _Refused as refused:
                    if on_skip is not None:
                        on_skip(prompt, str(refused))
                else:
                    yield answered
    finally:
        cancelled.set()
        pool.shutdown(wait=False, cancel_futures=True)


class _Refused(ValueError):
    """There is no answer to this request, and asking again would not help."""


@dataclass(frozen=True)
class _Server:
    client: Any
    base_url: str
    model: str | None
    max_tokens: int
    dialect: Mapping[str, Any]

    def only_model(self) -> str:
        """The name of the only model listed; a ValueError with the choices if there is another number of them."""
        try:
            names = [entry.id for entry in self._call(self.client.models.list).data]
        except (AttributeError, TypeError):  # the client's own, where a web page answers
            names = []
        if len(names) != 1:
            found = ", ".join(names[:20]) or "none"
            raise ValueError(f"{self.base_url} lists these models: {found}; expected one: pass the target's as `model`")
        return names[0]

    def find_dialect(self, temperatures: Sequence[float]) -> Mapping[str, Any]:
        """The first dialect in which the server answers at all of the temperatures; a ValueError if there is none."""
        for dialect in _DIALECTS:
            brief = replace(self, dialect=dialect, max_tokens=1)
            try:
                for temperature in temperatures:
                    brief.reply([{"role": "user", "content": "Hello"}], temperature, seed=0)
                return dialect
            except _Refused as refused:
                reason = str(refused)
        raise ValueError(f"{self.base_url} refuses to answer `Hello` as {self.model!r} ({reason}): correct `model`")

    def converse(self, prompt: Prompt, temperature: float, seed: int, cancelled: Event) -> Answered:
        """Answers turn by turn; see `reply` for the errors."""
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
        """The next message and its tokens; _Refused if the request is at fault, other errors if any would fail."""
        sampling = {"seed": seed, "extra_body": self.dialect} if temperature > 0 else {}
        fields = {"temperature": temperature, "top_p": 1.0, "max_tokens": self.max_tokens, **sampling}
        response = self._call(self.client.chat.completions.create, model=self.model, messages=messages, **fields)
        if not getattr(response, "choices", None):
            raise _Refused("the response has no choices")
        tokens = response.usage.completion_tokens if response.usage else 0
        return (response.choices[0].message.content or "").strip(), tokens

    def _call(self, request: Callable[..., Any], **arguments: Any) -> Any:
        import openai

        try:
            return request(**arguments)
        except openai.OpenAIError as error:
            raise self._explained(error) from None  # a server may repeat the key in what it says

    def _explained(self, error: Any) -> Exception:
        url, status, body = self.base_url, getattr(error, "status_code", None), getattr(error, "body", None)
        if isinstance(body, dict):
            body = body.get("message") or body.get("detail") or body
        said = " ".join(str(body or error.__cause__ or error).split()).replace(self.client.api_key, "***")[:300]
        if status in (400, 413, 422):
            return _Refused(f"{status}: {said}")
        if status in (401, 403):
            return ValueError(f"{url} refuses the API key ({status}): set HSDRAFT_API_KEY to the server's")
        if status == 404:
            return ValueError(f"{url} has no model {self.model!r} ({said}): pass a name that {url}/models lists")
        if status is None:
            expected = "expected an OpenAI-compatible server, such as `vllm serve MODEL`: start it or correct the url"
            return ConnectionError(f"no answer from {url} ({said}); {expected}")
        return ConnectionError(f"{url} keeps failing ({status}: {said}): see the server's log and run again")
