"""Several answers to one request (`n`) and the log-probabilities of their tokens, in transformers' documents."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

_LEAST = -9999.0  # in place of minus infinity, which JSON lacks
_FAILED = 'data: {"error": "'  # the event of an error, by transformers' handlers


class TokenLogProbs(LogitsProcessor):
    """Collects the log-probabilities of a text's new tokens, after penalties and before temperature and warpers.

    Args:
        most: number of most probable tokens to report at each place.
        prompt: number of tokens of the prompt.
        ends: tokens that end a text, which are not reported.
        chat: whether they are reported as `/v1/chat/completions` does, otherwise as `/v1/completions`.
    """

    row_wise = True

    def __init__(self, tokenizer: Any, most: int, prompt: int, ends: Collection[int], chat: bool) -> None:
        self._tokenizer, self._most, self._ends, self._chat = tokenizer, most, ends, chat
        self._prompt = self._length = prompt
        self._last, self._offset = -1, 0
        self._rows: dict[tuple[int, int], torch.Tensor] = {}  # by length and last token of the text
        self._noted = deque[tuple[int, float, list[int], list[float]]]()  # by another thread than that of `take`

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        last = int(input_ids[0, -1]) if length > self._prompt else -1
        self._rows[length, last] = scores[0].float().log_softmax(dim=-1)
        return scores

    def note(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were added to the text."""
        for token in tokens:
            row = self._rows[self._length, self._last]
            top = row.topk(self._most)
            if token not in self._ends:
                self._noted.append((token, float(row[token]), top.indices.tolist(), top.values.tolist()))
            self._length, self._last = self._length + 1, token
        self._rows.clear()

    def take(self) -> dict[str, Any] | None:
        """Returns the `logprobs` of a choice for the tokens noted since the last call; None for no token."""
        found = [self._noted.popleft() for _ in range(len(self._noted))]
        if not found:
            return None
        if self._chat:
            content = [
                {**self._told(token, value), "top_logprobs": [self._told(*pair) for pair in zip(*top, strict=True)]}
                for token, value, *top in found
            ]
            return {"content": content, "refusal": None}
        told = [self._told(token, value) for token, value, *_ in found]
        tops = [[self._told(*pair) for pair in zip(*top, strict=True)] for _, _, *top in found]
        offsets = [self._offset]
        for each in told:
            offsets.append(offsets[-1] + len(each["token"]))
        self._offset = offsets.pop()
        return {
            "tokens": [each["token"] for each in told],
            "token_logprobs": [each["logprob"] for each in told],
            "top_logprobs": [{each["token"]: each["logprob"] for each in top} for top in tops] if self._most else None,
            "text_offset": offsets,
        }

    def _told(self, token: int, value: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": max(value, _LEAST), "bytes": list(text.encode())}


def joined(bodies: Sequence[bytes], logprobs: Sequence[TokenLogProbs | None]) -> dict[str, Any]:
    """Makes one document of those of single answers."""
    documents = [json.loads(body) for body in bodies]
    choices = [document["choices"][0] for document in documents]
    for index, (choice, own) in enumerate(zip(choices, logprobs, strict=True)):
        choice |= {"index": index} if own is None else {"index": index, "logprobs": own.take()}
    return {**documents[0], "choices": choices, "usage": _sum([document["usage"] for document in documents])}


async def interleaved(streams: Sequence[AsyncIterator[str]], answers: Sequence[Any], end: str) -> AsyncIterator[str]:
    """Yields the events of one or several answers as they come, as those of one, then `end`.

    The last event has the usage of all. An error ends them, told as OpenAI's servers do: transformers puts its message
    alone where an object belongs.
    """
    parts, used = asyncio.Queue[tuple[int, str]](), list[Mapping[str, int]]()

    async def read(index: int, stream: AsyncIterator[str]) -> None:
        try:
            async for part in stream:
                parts.put_nowait((index, part))
        finally:
            parts.put_nowait((index, ""))

    def documents(answer: Any, part: str) -> Iterator[dict[str, Any]]:
        for event in filter(None, part.split("\n\n")):
            if answer.failure and event.startswith(_FAILED):
                yield answer.failure
                continue
            document = json.loads(event.removeprefix("data: "))
            if usage := document.pop("usage", None):
                used.append(usage)
                document |= {"usage": _sum(used)} if len(used) == len(streams) else {}
            for choice in document.get("choices", ()):
                logprobs = None if answer.logprobs is None else answer.logprobs.take()
                choice |= {"index": answers.index(answer)} | ({} if logprobs is None else {"logprobs": logprobs})
            yield document

    readers = [asyncio.ensure_future(read(*each)) for each in enumerate(streams)]
    left, failed = len(readers), False
    try:
        while left and not failed:
            index, part = await parts.get()
            if not part:
                await readers[index]  # raises its error
                left -= 1
            found = [*documents(answers[index], part)]
            failed = any("error" in each for each in found)
            if text := "".join(f"data: {json.dumps(each)}\n\n" for each in found if each):
                yield text
    finally:
        for reader in readers:
            reader.cancel()
    yield end


def _sum(usages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    prompt, new = usages[0]["prompt_tokens"], sum(each["completion_tokens"] for each in usages)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
