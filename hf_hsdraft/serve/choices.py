"""Several answers to one request (`n`) and the log-probabilities of their tokens, in transformers' documents."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

_LEAST = -9999.0  # in place of minus infinity, which JSON lacks


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


async def interleaved(
    streams: Sequence[AsyncIterator[str]], logprobs: Sequence[TokenLogProbs | None]
) -> AsyncIterator[str]:
    """Yields the events of several streams as they come, as those of one; its last one has the usage of all."""
    events, used, errors = asyncio.Queue[tuple[int, str]](), list[Mapping[str, int]](), dict[int, Exception]()

    async def read(index: int, stream: AsyncIterator[str]) -> None:
        try:
            async for part in stream:
                for event in filter(None, part.split("\n\n")):
                    events.put_nowait((index, event))
        except Exception as error:
            errors[index] = error
        finally:
            events.put_nowait((index, ""))

    readers = [asyncio.ensure_future(read(*each)) for each in enumerate(streams)]
    left = len(readers)
    try:
        while left:
            index, event = await events.get()
            left -= not event
            if not event and (error := errors.get(index)) is not None:
                raise error
            document = json.loads(event.removeprefix("data: ")) if event else {}
            if usage := document.pop("usage", None):
                used.append(usage)
                document |= {"usage": _sum(used)} if len(used) == len(readers) else {}
            for choice in document.get("choices", ()):
                own = logprobs[index]
                said = None if own is None else own.take()
                choice |= {"index": index} if said is None else {"index": index, "logprobs": said}
            if document:
                yield f"data: {json.dumps(document)}\n\n"
            if "error" in document:
                return
    finally:
        for reader in readers:
            reader.cancel()


def _sum(usages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    prompt, new = usages[0]["prompt_tokens"], sum(each["completion_tokens"] for each in usages)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
