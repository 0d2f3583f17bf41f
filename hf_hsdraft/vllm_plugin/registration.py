"""What vLLM calls when it starts, in each of its processes: entry point `vllm.general_plugins`."""

from __future__ import annotations

_ARCHITECTURE = "HSDraftForVllm"


def register() -> None:
    """Makes vLLM load hidden-state drafters as draft models. May be called several times.

    N-grams need no registration: vLLM imports their class by its path.
    """
    from transformers import AutoConfig
    from vllm.model_executor.models.registry import ModelRegistry

    from .draft_config import HSDraftVllmConfig

    AutoConfig.register(HSDraftVllmConfig.model_type, HSDraftVllmConfig, exist_ok=True)
    ModelRegistry.register_model(_ARCHITECTURE, f"{__package__}.draft_model:{_ARCHITECTURE}")
