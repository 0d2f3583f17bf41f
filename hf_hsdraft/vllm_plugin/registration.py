"""What vLLM calls when it starts, in each of its processes: entry point `vllm.general_plugins`."""

from __future__ import annotations

import logging

_VERSION = "0.32"  # the plugin was written for
_ARCHITECTURE = "HSDraftForVllm"


def register() -> None:
    """Makes vLLM load hidden-state drafters as draft models. May be called several times.

    N-grams need no registration: vLLM imports their class by its path. vLLM calls this at every start, also where
    nobody drafts. So in a vLLM of another version it logs what is missing, and vLLM starts all the same.
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
