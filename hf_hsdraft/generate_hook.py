"""The one place that touches transformers' `generate()`."""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from .cacheback import CachebackDrafter
from .decoding import check_target, speculative_decoding
from .grouped_attention import install as install_grouped_attention
from .modeling_hsdraft import HSDrafter


def install() -> None:
    """Makes `generate(assistant_model=drafter)` work. Idempotent; other calls pass straight through.

    A drafter that came with code of its own, from a repository of the Hub, brings a copy of this module. Each copy
    wraps what it finds and answers for its own drafters only, so copies of any versions get along in one process.
    """
    if _is_installed(GenerationMixin._assisted_decoding):
        return
    install_grouped_attention()
    GenerationMixin._assisted_decoding = _hooked_decoding(GenerationMixin._assisted_decoding)
    GenerationMixin._validate_generation_mode = _hooked_validation(GenerationMixin._validate_generation_mode)


def _is_installed(method: Any) -> bool:
    """Whether this copy's wrapper is among those around a method."""
    while method is not None:
        if getattr(method, "_hsdraft_drafter", None) is HSDrafter:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _hooked_decoding(original: Any) -> Any:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        if not isinstance(drafter, HSDrafter | CachebackDrafter):
            return original(self, *args, **kwargs)
        del kwargs["assistant_model"]
        for name in ("inputs_tensor", "assistant_tokenizer"):
            kwargs.pop(name, None)
        return speculative_decoding(self, drafter, *args, **kwargs)

    _assisted_decoding._hsdraft_drafter = HSDrafter  # type: ignore[attr-defined]
    return _assisted_decoding


def _hooked_validation(original: Any) -> Any:
    """Checks the target first: transformers would answer another vocabulary with advice about tokenizers."""

    @functools.wraps(original)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> Any:
        drafter = generation_mode_kwargs.get("assistant_model")
        if isinstance(drafter, HSDrafter | CachebackDrafter) and generation_mode == GenerationMode.ASSISTED_GENERATION:
            check_target(self, drafter)
            # Several sequences, stateful caches and other encoders are no matter of the mode but of the runtime.
            generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode
