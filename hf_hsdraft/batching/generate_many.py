"""`generate_many`: many prompts, each with its own arguments, decoded together with drafts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..drafters.base.protocol import Drafter
from ..generate.attachment import Attachment, attached
from .scheduler import ContinuousBatching, FinishedText

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
) -> Iterator[FinishedText]:
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

    Yields:
        A [`FinishedText`] for each request, in the order in which they are done; its `error` is of this request.

    Raises:
        ValueError: no drafter was given and none is attached, or a size is invalid.
    """
    attachment = attached(model) if assistant_model is None else None
    drafter = assistant_model if attachment is None else attachment.drafter
    if drafter is None:
        raise ValueError("generate_many needs a drafter: give assistant_model, or attach one to the model")
    batching = ContinuousBatching(model, drafter, max_batch_size, chunk_size, max_cache_tokens, prefix_cache_tokens)
    return _decoded(batching, iter(requests), kwargs, attachment)


def _decoded(
    batching: ContinuousBatching, requests: Iterator[Any], common: Mapping[str, Any], attachment: Attachment | None
) -> Iterator[FinishedText]:
    more, begun = True, time.perf_counter()
    with contextlib.closing(batching):  # also if the caller leaves early
        while more or batching.busy:
            while more and batching.free > 0:
                request = next(requests, None)
                more = request is not None
                if request is None:
                    break
                try:
                    arguments = {**common, **_arguments_of(request, batching.target)}
                except Exception as error:  # of any type: the request may be anything
                    batching.refuse(error)
                else:
                    batching.submit(arguments, arguments.pop(_SEED, None))
            for done in batching.step():
                if attachment is not None and done.statistics is not None:
                    now = time.perf_counter()
                    attachment.count(done.statistics, now - begun)
                    begun = now
                yield done


def _arguments_of(request: Any, model: Any) -> dict[str, Any]:
    """Returns the arguments of `generate()` of a request, with `input_ids` `[1, length]` on the model's device."""
    given = dict(request) if isinstance(request, Mapping) else {"input_ids": request}
    ids = torch.as_tensor(given.pop("input_ids", given.pop("inputs", None)))
    return {**given, "input_ids": (ids[None] if ids.dim() == 1 else ids).to(model.device)}
