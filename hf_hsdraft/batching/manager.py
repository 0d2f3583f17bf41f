"""transformers' continuous batching, which drafts for a model with an attachment.

Managers of `init_continuous_batching`, by which `generate_batch` and TRL decode, stay transformers' own, with their
queues, results and thread. What decodes for them is exchanged when it is made: `ContinuousBatching` gets the requests.
Log-probabilities, processors that differ by request and models spread over devices are left to transformers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.streamers import BaseStreamer

from ..generate.attachment import attached
from ..runtime.prompt_inputs import room_left
from .requests import FinishedText
from .scheduler import ContinuousBatching

_ROWS, _CHUNK = 8, 512  # unless the configuration says otherwise


def init_continuous_batching(
    original: Any,
    target: Any,
    /,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    manager = original(target, generation_config, continuous_batching_config, workload_hints)
    if "_create_batch_processor" not in vars(manager):
        sizes, plainly = continuous_batching_config or ContinuousBatchingConfig(), manager._create_batch_processor
        manager._create_batch_processor = lambda: _processor(manager, sizes, plainly)
    if (attachment := attached(target)) is not None and (reason := _why_plainly(manager)):
        attachment.step_aside(reason)
    return manager


def _processor(manager: Any, sizes: Any, plainly: Callable[[], Any]) -> Any:
    """What decodes for a manager: transformers' own where nothing is attached to its model, or where it has to."""
    attachment, held = attached(manager.model), manager.batch_processor
    drafts = attachment is not None and not _why_plainly(manager)
    if drafts and manager._original_attn_impl is not None:  # it was changed for a paged cache
        manager.model.set_attn_implementation(manager._original_attn_impl)
        manager._original_attn_impl = None
    if isinstance(held, DraftingProcessor):
        if drafts and held.attachment is attachment:
            return held
        manager.batch_processor = None  # else it would be used again
    return DraftingProcessor(manager, attachment, sizes) if drafts else plainly()


def _why_plainly(manager: Any) -> str:
    asked = manager.continuous_batching_config
    reasons = {
        "it returns log-probabilities": asked.return_logprobs,
        "its requests may have processors of their own": asked.per_request_processors,
        "its model is spread over several devices": manager.distributed_helper.tp_size > 1,
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return found and f"transformers' continuous batching does not draft where {found}"


class DraftingProcessor(ContinuousBatchProcessor):
    """Decodes the requests of a transformers manager with drafts, in the place of its processor and its scheduler."""

    use_async_batching = False
    inputs_and_outputs = SimpleNamespace(compute_stream=None)

    def __init__(self, manager: Any, attachment: Any, sizes: Any) -> None:
        self.attachment = attachment
        for name in ("input_queue", "cancel_queue", "output_router", "background_thread_status", "distributed_helper"):
            setattr(self, name, getattr(manager, name))
        self.cb_config, self.logit_processor = manager.continuous_batching_config, manager.logit_processor
        self._target, self._samples = manager.model, bool(manager.generation_config.do_sample)
        rows, chunk = sizes.max_requests_per_batch or _ROWS, sizes.max_batch_tokens or _CHUNK
        most = None if sizes.num_blocks is None else sizes.num_blocks * sizes.page_size
        drafter = attachment.follow(self._target)
        self._batching = ContinuousBatching(self._target, drafter, rows, chunk, most, attachment=attachment)
        self._seeds = itertools.repeat(None) if self.cb_config.seed is None else itertools.count(self.cb_config.seed)
        self._requests, self._done = dict[int, _Tokens](), list[FinishedText]()

    @property
    def scheduler(self) -> DraftingProcessor:
        return self

    def add_waiting_request(self, state: RequestState) -> None:
        """Submits a request, and one for each further answer to its prompt."""
        forks = [state.fork(f"{state.request_id}__child#{index}") for index in range(state.num_children)]
        ids = torch.tensor([state.initial_tokens], dtype=torch.int64, device=self._target.device)
        limit = room_left(self._target, ids.shape[1]) if state.max_new_tokens is None else state.max_new_tokens
        # The manager's processors are all: none is added for what the configuration of the model says.
        neutral = {**GenerationConfig._get_default_generation_params(), "top_k": 0, "max_length": None}
        own = {"do_sample": self._samples, "max_new_tokens": limit, "pad_token_id": 0}
        config = GenerationConfig(**{**neutral, **own}, eos_token_id=sorted(state._eos_token_ids) or -1)
        processors = list(self.logit_processor.logits_processor)
        for each in (*forks, state):
            tokens, call = _Tokens(each), {"input_ids": ids, "generation_config": config}
            call |= {"logits_processor": processors, "streamer": tokens}
            self._requests[self._batching.submit(call, next(self._seeds))] = tokens

    def set_request_cancellation(self, request_id: str) -> None:
        for index in self._numbers_of(request_id):
            self._batching.cancel(index)

    def get_active_request_static_outputs(self, request_id: str) -> list[int]:
        return [
            token for index in self._numbers_of(request_id) for token in self._requests[index].state.generated_tokens
        ]

    def _numbers_of(self, request_id: str) -> list[int]:
        return [index for index, tokens in self._requests.items() if tokens.state.request_id == request_id]

    def has_pending_requests(self) -> bool:
        return self._batching.busy

    def prepare_next_batch(self) -> bool:
        return not self._update_tp_group_state() and self._batching.busy

    def _generation_step(self, model: Any) -> None:
        self._done = self._batching.step()

    def update_batch(self) -> None:
        """Delivers texts that are done, and new tokens of those that are streamed."""
        outputs = []
        for done in self._done:
            state = self._requests[done.index].state
            if done.error is not None:
                self._handle_request_error(done.error, state)
            elif not done.cancelled:
                state.status = RequestStatus.FINISHED
                outputs.append(state.to_generation_output())
            del self._requests[done.index]
        for tokens in self._requests.values():
            if tokens.state.streaming and tokens.new:
                outputs.append(tokens.state.to_generation_output())
            tokens.new = False
        self.output_router.deliver_batch(outputs)

    def fail_all_requests(self, error: Exception) -> None:
        for tokens in list(self._requests.values()):
            self._handle_request_error(error, tokens.state)
        self._requests.clear()
        self._batching.close()

    def warmup(self, model: Any) -> None:
        """Nothing: the first requests do it."""


class _Tokens(BaseStreamer):
    """Notes the new tokens of a request, which come after its prompt."""

    def __init__(self, state: RequestState) -> None:
        self.state, self.new, self._begun = state, False, False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self.state.status, self.new = RequestStatus.DECODING, True
            self.state.generated_tokens += (ids := value.flatten().tolist())
            self.state._timestamps += [time.perf_counter()] * len(ids)
        self._begun = True

    def end(self) -> None:
        pass
