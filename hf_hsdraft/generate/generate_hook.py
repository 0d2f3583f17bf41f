"""The patch of `generate(assistant_model=drafter)`, with a hint for drafting options that were given to the call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, WhisperNoSpeechDetection
from transformers.utils import logging

from ..core.statistics import DraftStatistics
from ..drafters.base.draft_options import option_names
from ..drafters.base.protocol import Drafter
from ..engine.call_output import HSDraftEncoderDecoderOutput, HSDraftGenerateOutput, named_target
from ..engine.decoding import check_drafter, speculative_decoding, told_of_class
from ..runtime.module_hooks import no_hooks_left
from ..runtime.target_limits import GRADIENTS, check_inputs, gradients_flow
from .by_name import with_drafter

logger = logging.get_logger(__name__)


class _Lent:
    """A drafter as a target's own `generate` sees it, with a copy of its options.

    A target such as Whisper writes to its assistant's options. It gets this object instead, so that no call changes a
    drafter. `begin_suppress_tokens` are the call's: Whisper drops them if it has an assistant, as its own kind of
    assistant must be able to end a text at once; plain decoding obeys them, so a drafted call does too.
    """

    def __init__(self, drafter: Drafter, begin_suppress_tokens: Any) -> None:
        self.drafter = drafter
        self.generation_config = copy.deepcopy(drafter.generation_config)
        self.begin_suppress_tokens = begin_suppress_tokens

    def __getattr__(self, name: str) -> Any:
        if name == "drafter":  # during a copy
            raise AttributeError(name)
        return getattr(self.drafter, name)


def _drafter_of(assistant: Any) -> Drafter | None:
    """The call's drafter, or `None` for a foreign assistant."""
    drafter = assistant.drafter if isinstance(assistant, _Lent) else assistant
    return drafter if isinstance(drafter, Drafter) else None


def prepare_config(original: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Puts a drafter in the place of its name, or `_Lent` in a drafter's, for targets with their own `generate`.

    Such a `generate` passes all arguments, the assistant included, to this method, and uses what it returns. That of
    transformers passes no assistant, so nothing happens there.
    """
    config, others = original(target, *args, **kwargs)
    others = with_drafter(target, others)
    if (drafter := _drafter_of(others.get("assistant_model"))) is not None:
        others["assistant_model"] = _Lent(drafter, config.begin_suppress_tokens)
    return config, others


def assisted_decoding(original: Any, target: Any, /, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    assistant = kwargs.get("assistant_model")
    drafter = _drafter_of(assistant)
    if drafter is None:
        return original(target, input_ids, *args, **kwargs)
    del kwargs["assistant_model"]
    for name in ("inputs_tensor", "assistant_tokenizer"):
        kwargs.pop(name, None)
    if isinstance(assistant, _Lent) and kwargs["generation_config"].begin_suppress_tokens is None:
        processors, tokens = kwargs["logits_processor"], assistant.begin_suppress_tokens
        kwargs["logits_processor"] = _with_suppressed_begin(processors, tokens, input_ids)
    if gradients_flow(target, kwargs):
        return _plainly(target, drafter, input_ids, *args, **kwargs)
    if drafter.decoding is not None:
        return drafter.decoding(target, input_ids, *args, **kwargs)
    with no_hooks_left(target):
        return speculative_decoding(target, drafter, input_ids, *args, **kwargs)


def _plainly(target: Any, drafter: Drafter, input_ids: Any, *args: Any, tokenizer: Any = None, **kwargs: Any) -> Any:
    """Decodes a call without drafts, whose output a backward pass may start from."""
    logger.warning_once(f"A call of generate() is decoded without drafts: {GRADIENTS}.")
    output = target._sample(input_ids, *args, **kwargs)
    if isinstance(output, torch.Tensor):
        return output
    statistics = DraftStatistics(reason=GRADIENTS, drafter=type(drafter).__name__, target=named_target(target))
    kind = HSDraftEncoderDecoderOutput if target.config.is_encoder_decoder else HSDraftGenerateOutput
    return kind(**output, statistics=statistics)


def _with_suppressed_begin(processors: Any, tokens: Any, input_ids: Any) -> Any:
    """Adds the processor that suppresses tokens at a text's beginning, where Whisper would put it."""
    if tokens is None:
        return processors
    suppressing = SuppressTokensAtBeginLogitsProcessor(tokens, begin_index=input_ids.shape[1], device=input_ids.device)
    # Speech detection reads the unprocessed scores.
    listens = [isinstance(one, WhisperNoSpeechDetection) for one in processors]
    first = listens.index(True) + 1 if True in listens else 0
    return LogitsProcessorList([*processors[:first], suppressing, *processors[first:]])


def validate_mode(
    original: Any, target: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
) -> Any:
    """Checks the target first: transformers would answer another vocabulary with advice about tokenizers."""
    mode, kwargs = generation_mode, generation_mode_kwargs
    assistant = kwargs.get("assistant_model")
    if isinstance(assistant, type):
        raise ValueError(f"assistant_model={told_of_class(assistant)}")
    drafter = _drafter_of(assistant)
    if drafter is not None:  # its modes and encoders are not those that transformers' own check knows
        kwargs = {name: value for name, value in kwargs.items() if name != "assistant_model"}
    if drafter is not None and mode == GenerationMode.ASSISTED_GENERATION:
        check_drafter(drafter, target)
        check_inputs(target)  # before the prompt is streamed
        # Several sequences, stateful caches and other encoders are checked by the runtime, not by mode.
        mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
    return original(target, mode, generation_config, kwargs)


def validate_model_kwargs(original: Any, target: Any, model_kwargs: dict[str, Any]) -> None:
    """Adds to the error about unknown arguments where drafting options are set."""
    try:
        original(target, model_kwargs)
    except ValueError as error:
        found = sorted(model_kwargs.keys() & _option_names())
        if not found:
            raise
        places = ", ".join(f"drafter.generation_config.{name} = {model_kwargs[name]!r}" for name in found)
        raise ValueError(f"{error}. Drafting options are set on the drafter, before the call: {places}") from None


def _option_names() -> set[str]:
    """Names of all drafting options of all families."""
    names, families = option_names(), [Drafter]
    while families:
        family = families.pop()
        names |= {option.name for option in family.own_options}
        families += family.__subclasses__()
    return names
