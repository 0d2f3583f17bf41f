"""Entry point `vllm.general_plugins`, which vLLM calls when each of its processes starts."""

from __future__ import annotations

import logging

_VERSION = "0.32"  # supported vLLM version
_ARCHITECTURE = "HSDraftForVllm"


def register() -> None:
    """Registers hidden-state drafters as draft models of vLLM. May be called repeatedly.

    N-grams need none: vLLM imports their class by its path. vLLM calls this at every start, also without a drafter, so
    in another version of vLLM it only logs an error.
    """
    try:
        from transformers import AutoConfig
        from vllm.model_executor.models.registry import ModelRegistry

        from .draft_config import HSDraftVllmConfig
    except ImportError as error:
        logging.getLogger(__name__).error(
            "hf_hsdraft: vLLM cannot draft with hidden-state drafters here (%s): install vLLM %s", error, _VERSION
        )
        return
    AutoConfig.register(HSDraftVllmConfig.model_type, HSDraftVllmConfig, exist_ok=True)
    ModelRegistry.register_model(_ARCHITECTURE, f"{__package__}.draft_model:{_ARCHITECTURE}")
