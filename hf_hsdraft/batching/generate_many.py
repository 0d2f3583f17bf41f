"""`generate_many`: many prompts, each with its own arguments, decoded together with drafts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..core.statistics import DraftStatistics
from ..drafters.base.protocol import Drafter
from ..generate.attachment import attached
from .requests import FinishedText
from .scheduler import ContinuousBatching

_SEED = "seed"


def generate_many(
    model: Any,
    requests: Iterable[Mapping[str, Any] | torch.Tensor | list[int]],
    assistant_model: Drafter | None = None,
    *,
    max_batch_size: int = 8,
    chunk_size: int = 512,
    max_cache_tokens: int | None = None,
    prefix_cache_tokens: int = 4096,
    **kwargs: Any,
) -> FinishedTexts:
    """Decodes requests together: texts join and leave the batch as there is room, and each is what it is alone.

    Every request gets the text that `model.generate()` gives it alone with the same arguments, and when sampling the
    same seed: equal in float32, in half precision up to rounding, as in batches.

    Args:
        model: the target.
        requests: read one by one as there is room. Each is a prompt, `[length]` or `[1, length]` token ids, or has
            arguments of `generate()` with `input_ids`, and `seed` for its random numbers.
        assistant_model: the drafter; by default the one that is attached to the model.
        max_batch_size: number of texts decoded together.
        chunk_size: number of tokens of prompts read between two rounds: the longest that running texts wait.
        max_cache_tokens, prefix_cache_tokens: see `ContinuousBatching`.
        kwargs: arguments of `generate()` for all requests; those of a request override them. Requests that share a
            processor, criterion or streamer that may keep a state are decoded one after another; `row_wise = True` on
            the object, or its class, says that it keeps none.

    Returns:
        An iterator over a [`FinishedText`] for each request, in the order in which they are done; its `error` is of
        this request. `async for` takes it too.

    Raises:
        ValueError: no drafter was given and none is attached, or a size is invalid.
    """
    attachment = attached(model) if assistant_model is None else None
    drafter = assistant_model if attachment is None else attachment.follow(model)
    if drafter is None:
        raise ValueError("generate_many needs a drafter: give assistant_model, or attach one to the model")
    sizes = max_batch_size, chunk_size, max_cache_tokens, prefix_cache_tokens
    return FinishedTexts(ContinuousBatching(model, drafter, *sizes, attachment), iter(requests), kwargs)


class FinishedTexts(Iterator[FinishedText]):
    """Texts of `generate_many`; with `async for`, rounds are decoded on another thread."""

    def __init__(self, batching: ContinuousBatching, requests: Iterator[Any], common: Mapping[str, Any]) -> None:
        self._batching, self._requests, self._common = batching, requests, common
        self._more, self._done = True, deque[FinishedText]()

    @property
    def statistics(self) -> DraftStatistics:
        """Sum over the texts that are done; a forward over several counts once."""
        return self._batching.tally.statistics

    @property
    def alone(self) -> Mapping[str, int]:
        """Number of requests decoded as calls of their own, by reason."""
        return self._batching.alone

    def __next__(self) -> FinishedText:
        while not self._done:
            if not self._goes_on():
                raise StopIteration
            self._round()
        return self._done.popleft()

    async def __aiter__(self) -> AsyncIterator[FinishedText]:
        with contextlib.closing(self):
            while self._done or self._goes_on():
                while self._done:
                    yield self._done.popleft()
                if self._goes_on():
                    await _uninterrupted(asyncio.to_thread(self._round))

    def close(self) -> None:
        """Ends all, and frees the batch."""
        self._more = False
        self._batching.close()

    __del__ = close

    def _goes_on(self) -> bool:
        return self._more or self._batching.busy

    def _round(self) -> None:
        """Submits requests as there is room, and decodes one round."""
        batching = self._batching
        while self._more and batching.free > 0:
            request = next(self._requests, None)
            self._more = request is not None
            if request is None:
                break
            try:
                arguments = {**self._common, **_arguments_of(request, batching.target)}
            except Exception as error:  # of any type: the request may be anything
                batching.refuse(error)
            else:
                batching.submit(arguments, arguments.pop(_SEED, None))
        self._done += batching.step()


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Waits for the end of `work`, also if it is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _arguments_of(request: Any, model: Any) -> dict[str, Any]:
    """Returns the arguments of `generate()` of a request, with `input_ids` `[1, length]` on the model's device."""
    given = dict(request) if isinstance(request, Mapping) else {"input_ids": request}
    ids = torch.as_tensor(given.pop("input_ids", given.pop("inputs", None)))
    return {**given, "input_ids": (ids[None] if ids.dim() == 1 else ids).to(model.device)}
