"""Drafter families by the `model_type` of their config.json."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from ...core.methods import Registry, offered
from .plain_config import described


@dataclass(frozen=True)
class Family:
    """A family of drafters that load from files; `drafter` has `from_pretrained`."""

    config: Any
    drafter: Any


class TokenizerOfTarget:
    """Placeholder tokenizer: pipelines load an assistant's tokenizer and discard it."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> TokenizerOfTarget:
        return cls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a drafter has no tokenizer: use that of its target")


FAMILIES: Registry[Family] = Registry("model_type")
_CORE = ("block", "eagle", "hidden_state.modeling_hsdraft", "language_model", "mtp.drafter", "ngrams.cacheback")


def load_families() -> None:
    """Imports the core families, which register themselves; families of methods are loaded by name."""
    for module in _CORE:
        importlib.import_module(f"..{module}", __package__)


def register_drafter(model_type: str, config: Any, drafter: Any) -> None:
    """Registers a family with `AutoDrafter` and everything that takes a drafter's name. Idempotent.

    Redefined classes, as in a re-run notebook cell, replace the earlier ones. If the configuration is a transformers
    class, `AutoModel` and pipelines load the family too.

    Raises:
        ValueError: another family uses this `model_type`, or it is not the configuration's.
    """
    family, known = Family(config, drafter), FAMILIES.get(model_type)
    if known is not None and _names(known) != _names(family):
        raise ValueError(f"model_type={model_type!r} is taken by {known.drafter.__name__}: expected a name of its own")
    if config.model_type != model_type:
        raise ValueError(
            f"{config.__name__}.model_type={config.model_type!r} is invalid: expected {model_type!r}, as registered"
        )
    if known == family:
        return
    if issubclass(config, PreTrainedConfig):
        described(config)
        AutoConfig.register(model_type, config, exist_ok=known is not None or model_type in offered("AutoConfig"))
        AutoModel.register(config, drafter, exist_ok=known is not None)
        AutoTokenizer.register(config, TokenizerOfTarget, exist_ok=known is not None)
    FAMILIES[model_type] = family


def _names(family: Family) -> list[str]:
    return [f"{one.__module__}.{one.__qualname__}" for one in (family.config, family.drafter)]


def _loaded_later(model_type: str) -> Any:
    """Placeholder configuration of a method: constructing it loads and registers the method."""

    class LoadedLater:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return FAMILIES[model_type].config(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return FAMILIES[model_type].config.from_dict(*args, **kwargs)

    return LoadedLater


for _model_type in offered("AutoConfig"):
    if _model_type not in FAMILIES.loaded:
        AutoConfig.register(_model_type, _loaded_later(_model_type), exist_ok=True)
