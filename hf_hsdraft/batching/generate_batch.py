"""transformers' `generate_batch`, which drafts for a model with an attachment.

Calls that ask for several answers to a prompt, time stamps, a manager that stays or a configuration of it are left to
transformers.
"""

from __future__ import annotations

import time
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..generate.attachment import attached
from .generate_many import generate_many
from .requests import FinishedText

_BATCH = 8


def generate_batch(
    original: Any,
    target: Any,
    /,
    inputs: list[list[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    config = target.generation_config if generation_config is None else generation_config
    several = (config.num_return_sequences or 1) > 1
    own = several or record_timestamps or persistent_manager or continuous_batching_config is not None
    if own or attached(target) is None:
        further = {"record_timestamps": record_timestamps, "progress_bar": progress_bar, "warmup": warmup, **kwargs}
        found: dict[str, GenerationOutput] = original(
            target,
            inputs,
            generation_config,
            continuous_batching_config,
            persistent_manager=persistent_manager,
            **further,
        )
        return found
    given = {"generation_config": generation_config, "max_new_tokens": kwargs.get("max_new_tokens")}
    options = {name: value for name, value in given.items() if value is not None}
    began, outputs = time.perf_counter(), dict[int, GenerationOutput]()
    for done in generate_many(target, inputs, max_batch_size=_BATCH, **options):
        outputs[done.index] = _output(done, inputs[done.index], began)
    return {outputs[index].request_id: outputs[index] for index in sorted(outputs)}


def _output(done: FinishedText, prompt: list[int], began: float) -> GenerationOutput:
    """What transformers returns for a request."""
    output = GenerationOutput(f"req_{done.index}", list(prompt), created_time=began)
    output.lifespan = (began, time.perf_counter())
    if done.error is not None:
        output.status, output.error = RequestStatus.FAILED, str(done.error)
        return output
    sequences = getattr(done.output, "sequences", done.output)
    output.generated_tokens, output.status = sequences[0, len(prompt) :].tolist(), RequestStatus.FINISHED
    return output
