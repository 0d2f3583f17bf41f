"""Drafter families by the `model_type` of their config.json, and how well a drafter fits a target.

Families register themselves. Formats of drafters that other projects publish are in `methods/published/formats.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from ...core.checks import printable, public_name
from ...core.kept import kept_with
from ...core.methods import Registry, load, offered
from ...hub.checkpoint import Checkpoint, named_targets
from ...hub.drafter_files import CARD
from ...runtime.target_loading import DEFAULT_TARGET, gguf_of, load_config, load_tokenizer
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
_CORE = ("hidden_state.modeling_hsdraft", "lookup.cacheback")


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
        raise ValueError(f"model_type={model_type!r} is taken by {known.drafter.__name__}: expected another name")
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


# How a family drafts, as `hsdraft find` and `info` say it: which drafts, and how they are made.
TREES = "trees or chains"


def recognise(checkpoint: Checkpoint) -> Any:
    """Returns the `Format` of another project's files; raises a ValueError that says what was found if none matches."""
    if "formats" in offered("reading"):
        return load("reading", "formats").recognise(checkpoint)
    found = printable(checkpoint.config.get("model_type"))
    raise ValueError(
        f"{printable(checkpoint.name)} is no drafter of a known format (model_type={found}), as formats of other "
        f"projects belong to hf_hsdraft/methods: expected one of {', '.join(FAMILIES)}"
    )


class Evidence(IntEnum):
    """Why a drafter may fit a target, the best reason first."""

    NAMED = 0  # its files name this target
    SAME_TOKENS = 1  # it was made for a target of these sizes and this tokenizer
    BASE = 2  # its files name a model that this target was made from
    SIZES = 3  # it was made for a target of these sizes; whether for this one is unknown
    SMALLER = 4  # a smaller language model with this tokenizer


@dataclass(frozen=True)
class Fit:
    """That a drafter fits a target, and why."""

    evidence: Evidence
    why: str


@dataclass(frozen=True, eq=False)
class TargetInfo:
    """A target without its weights."""

    config: Any  # of transformers
    name: str = ""  # on the Hub; of a folder or file its last part; empty if it has none
    place: str = ""  # what transformers loads it from; empty for a GGUF file
    bases: frozenset[str] = frozenset()  # models that it was made from, as its card says
    read_tokenizer: Callable[[], Any] = lambda: None
    model: Any = None  # where it is loaded

    @classmethod
    def of_name(cls, name: str | None, target_name: str = "", local_files_only: bool = False) -> TargetInfo:
        """Reads configuration and tokenizer of a target by the name that `load_target` takes; raises as it does.

        `target_name` is its name on the Hub, where it is loaded from a folder or file.
        """
        config = load_config(name, local_files_only)
        place = name or DEFAULT_TARGET
        return cls(
            config,
            target_name or public_name(place),
            place if gguf_of(name) is None else "",
            frozenset(_bases(place)),
            lambda: load_tokenizer(name, local_files_only),
        )

    @classmethod
    def of_model(cls, model: Any, tokenizer: Any = None, local_files_only: bool = False) -> TargetInfo:
        """Describes a loaded target. Without `tokenizer`, it is read from where the model was loaded."""
        place = getattr(model, "name_or_path", "") or ""

        def read() -> Any:
            return tokenizer or AutoTokenizer.from_pretrained(place, local_files_only=local_files_only)

        return cls(model.config, public_name(place), place, frozenset(_bases(place)), read, model)

    @property
    def on_hub(self) -> str:
        """The name by which the Hub relates drafters to it: its own, or of a local one that of its base model."""
        return next((name for name in (self.name, *sorted(self.bases)) if name.count("/") == 1), "")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None if there is none."""
        try:
            return self.read_tokenizer()
        except Exception:  # loaders of tokenizers raise errors of any type
            return None

    def is_named(self, names: Collection[str]) -> bool:
        """Whether one of the names is this target's; that of a folder or file is compared with their last parts."""
        known = names if "/" in self.name else {name.rsplit("/", 1)[-1] for name in names}
        return bool(self.name) and self.name in known


def _bases(place: str) -> set[str]:
    """Names of models from which a target was made, if its card is here."""
    card = Path(place) / CARD if Path(place).is_dir() else None
    if card is None and place.count("/") == 1:
        found = try_to_load_from_cache(place, CARD)
        card = Path(found) if isinstance(found, str) else None
    return set() if card is None else named_targets(card.parent)


def fit_of(config: Any, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """Returns how well a drafter of a configuration of the target's sizes fits; None if it was made for another target.

    Args:
        config: with `target_hidden_size`, and `target_name` and `target_tokenizer_hash` if it has them.
        named: names of targets beside the configuration's, as `named_targets` finds them.
    """
    names = {*named, *filter(None, [getattr(config, "target_name", "")])}
    told = printable(", ".join(sorted(names)))
    if target.is_named(names):
        return Fit(Evidence.NAMED, "made for this target")
    recorded = getattr(config, "target_tokenizer_hash", "")
    digest = tokenizer_hash(target.tokenizer) if recorded and target.tokenizer is not None else ""
    if digest and digest == recorded:
        return Fit(Evidence.SAME_TOKENS, f"made for {told or 'a target'}, with the sizes and tokenizer of this one")
    if target.bases & names:
        return Fit(Evidence.BASE, f"made for {told}, this target's base model")
    if digest or config.target_hidden_size is None or (names and "/" in target.name):
        return None  # another model
    return Fit(Evidence.SIZES, f"made for {told or 'a target that is not named'}, with the sizes of this one")


def tokenizer_hash(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary, 16 hexadecimal digits."""

    def digest() -> str:
        vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    return kept_with(tokenizer, "digest", digest)
