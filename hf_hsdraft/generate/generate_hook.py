"""The patch of `generate(assistant_model=drafter)`."""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers import LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, WhisperNoSpeechDetection
from transformers.generation.utils import GenerationMixin

from ..drafters.base.protocol import Drafter
from ..engine.call_checks import check_drafter, told_of_class
from ..engine.decoding import speculative_decoding
from ..runtime.module_hooks import no_hooks_left
from ..runtime.target_limits import check_inputs


def install() -> None:
    """Makes `generate(assistant_model=drafter)` work. Idempotent; other calls are unchanged.

    A drafter loaded with its own code from the Hub brings a copy of this module. Each copy wraps what it finds and
    handles only its own drafters, so copies of different versions do not interfere.
    """
    if _is_installed(GenerationMixin._assisted_decoding):
        return
    GenerationMixin._assisted_decoding = _hooked_decoding(GenerationMixin._assisted_decoding)
    GenerationMixin._validate_generation_mode = _hooked_validation(GenerationMixin._validate_generation_mode)
    GenerationMixin._prepare_generation_config = _hooked_preparation(GenerationMixin._prepare_generation_config)


def _is_installed(method: Any) -> bool:
    """Whether this copy's wrapper is among those around a method."""
    while method is not None:
        if getattr(method, "_hsdraft_drafter", None) is Drafter:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


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


def _hooked_preparation(original: Any) -> Any:
    """Puts `_Lent` in a drafter's place for targets with their own `generate`.

    Such a `generate` passes all arguments, the assistant included, to this method, and uses what it returns. That of
    transformers passes no assistant, so nothing happens there.
    """

    @functools.wraps(original)
    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, others = original(self, *args, **kwargs)
        drafter = _drafter_of(others.get("assistant_model"))
        if drafter is not None:
            others["assistant_model"] = _Lent(drafter, config.begin_suppress_tokens)
        return config, others

    return _prepare_generation_config


def _hooked_decoding(original: Any) -> Any:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        assistant = kwargs.get("assistant_model")
        drafter = _drafter_of(assistant)
        if drafter is None:
            return original(self, input_ids, *args, **kwargs)
        del kwargs["assistant_model"]
        for name in ("inputs_tensor", "assistant_tokenizer"):
            kwargs.pop(name, None)
        if isinstance(assistant, _Lent) and kwargs["generation_config"].begin_suppress_tokens is None:
            processors, tokens = kwargs["logits_processor"], assistant.begin_suppress_tokens
            kwargs["logits_processor"] = _with_suppressed_begin(processors, tokens, input_ids)
        with no_hooks_left(self):
            return speculative_decoding(self, drafter, input_ids, *args, **kwargs)

    _assisted_decoding._hsdraft_drafter = Drafter  # type: ignore[attr-defined]
    return _assisted_decoding


def _with_suppressed_begin(processors: Any, tokens: Any, input_ids: Any) -> Any:
    """Adds the processor that suppresses tokens at a text's beginning, where Whisper would put it."""
    if tokens is None:
        return processors
    suppressing = SuppressTokensAtBeginLogitsProcessor(tokens, begin_index=input_ids.shape[1], device=input_ids.device)
    # Speech detection reads the unprocessed scores.
    listens = [isinstance(one, WhisperNoSpeechDetection) for one in processors]
    first = listens.index(True) + 1 if True in listens else 0
    return LogitsProcessorList([*processors[:first], suppressing, *processors[first:]])


def _hooked_validation(original: Any) -> Any:
    """Checks the target first: transformers would answer another vocabulary with advice about tokenizers."""

    @functools.wraps(original)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> Any:
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, type):
            raise ValueError(f"assistant_model={told_of_class(assistant)}")
        drafter = _drafter_of(assistant)
        if drafter is not None and generation_mode == GenerationMode.ASSISTED_GENERATION:
            check_drafter(drafter, self)
            check_inputs(self)  # before the prompt is streamed
            # Several sequences, stateful caches and other encoders are checked by the runtime, not by mode.
            generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode
