"""What is known of a target without its weights, and how well a drafter's configuration fits it."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...core.checks import are_ascending, misfit_of, printable, public_name
from ...hub.checkpoint import named_targets
from ...hub.drafter_files import CARD
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_loading import DEFAULT_TARGET, gguf_of, load_config, load_tokenizer


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


@dataclass(frozen=True)
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

    @cached_property
    def parameters(self) -> int | None:
        """Number of parameters; None if transformers has no causal language model of this configuration."""
        model = self.model if self.model is not None else empty_model(self.config)
        return None if model is None else sum(parameter.numel() for parameter in model.parameters())

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


def empty_model(config: Any) -> Any:
    """Builds a causal language model on the meta device, without weights; None if transformers cannot."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # configurations of other models, of code elsewhere, or incomplete ones
        return None


def misfit(config: Any, target: Any) -> str:
    """Returns which size of a target is not that of a drafter's configuration; empty if it fits.

    `target` is anything with a `config` of transformers.
    """
    if wrong := misfit_of(config, target, unknown=True, padding=getattr(config, "padding", 0)):
        return wrong
    layers = decoder_layers(text_config(target))
    taps = config.taps_of(layers) if hasattr(config, "taps_of") else ()
    if not are_ascending(taps, 0, layers):
        return f"the target has num_hidden_layers={layers}, the drafter reads its hidden states {list(taps)}"
    return ""


def fit_of(config: Any, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """Returns how well a drafter of a configuration fits; None if it was made for another target.

    Args:
        config: with the fields that `misfit_of` reads, and `target_name` and `target_tokenizer_hash` if it has them.
        named: names of targets beside the configuration's, as `named_targets` finds them.
    """
    if misfit(config, target):
        return None
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


_hashes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def tokenizer_hash(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary, 16 hexadecimal digits."""
    known = _hashes.get(tokenizer)
    if known is None:
        vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        known = _hashes[tokenizer] = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
    return known
