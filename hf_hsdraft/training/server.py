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

# Ways to ask a server for samples of the whole distribution. The first that the server accepts is used. Without them,
# servers apply the model's own top-k. `transformers serve` refuses `top_k`, and would be greedy at any temperature.
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
    """Lets a server answer prompts, and yields each conversation when it is finished, in no particular order.

    The temperature and the seed of a prompt depend on `seed` and the prompt's key alone. Closing the iterator drops
    unfinished conversations. `transformers serve --continuous-batching` samples every request as it samples the first
    one, so it is for greedy answers only.

    Args:
        url: URL of the server, with or without `/v1`.
        prompts: the prompts. Those with the same key are answered once.
        model: name of the target on the server; `None` for the only model that it lists. `transformers serve` lists no
            folders: pass the path that it was started with.
        temperatures: values to draw the temperature of each prompt from; 0 is greedy. Repeat a value to weigh it.
        max_new_tokens: greatest number of tokens of an answer.
        concurrency: number of conversations at once.
        seed: seed of all draws.
        api_key: key of the server; `None` for the one in `HSDRAFT_API_KEY`, if there is any.
        max_retries: greatest number of further attempts of a request, with growing pauses.
        timeout: seconds that a request may take.
        on_skip: called with each prompt that the server refuses or leaves without an answer, and the reason.

    Returns:
        An iterator over the finished conversations. The server has been tried before.

    Raises:
        ImportError: the `openai` package is missing.
        ConnectionError: the server cannot be reached or fails, now or during the iteration.
        ValueError: an argument is out of range, or the server refuses the API key or the model.
    """
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ImportError("answers by a server need its client: pip install -e '.[train]' in a checkout") from error
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
            for task in sorted(done, key=lambda task: task.exception() is not None):  # answers first, so none is lost
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
    """The server does not answer this request, and would not at another attempt."""


@dataclass(frozen=True)
class _Server:
    client: Any
    base_url: str
    model: str | None
    max_tokens: int
    dialect: Mapping[str, Any]

    def only_model(self) -> str:
        """Returns the name of the only model listed. Raises a ValueError with the choices if there is not just one."""
        try:
            names = [entry.id for entry in self._call(self.client.models.list).data]
        except (AttributeError, TypeError):  # the client raises them if a web page answers
            names = []
        if len(names) != 1:
            found = ", ".join(names[:20]) or "none"
            raise ValueError(f"{self.base_url} lists these models: {found}; expected one: pass the target's as `model`")
        return names[0]

    def find_dialect(self, temperatures: Sequence[float]) -> Mapping[str, Any]:
        """Returns the first dialect that the server accepts at all temperatures.

        Raises:
            ValueError: there is none.
        """
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

        Raises:
            _Refused: the server refuses this request.
            ValueError: it would refuse every request.
            ConnectionError: it cannot be reached, or fails.
        """
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
            raise self._explained(error) from None  # the error of the server may contain the key

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
