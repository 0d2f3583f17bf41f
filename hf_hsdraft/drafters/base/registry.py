"""Drafter families by the `model_type` of their config.json, and formats of drafters that other projects publish.

Families register themselves and the formats that they load. `AutoDrafter` tries formats in ascending `rank`, so those
with distinctive marks come before generic ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from ...core.checks import few, printable
from ...core.methods import Registry, offered
from ...hub.checkpoint import Checkpoint
from .plain_config import described
from .target_info import Fit, TargetInfo


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
_CORE = (
    "block.formats", "eagle.older_formats", "heads.formats", "hidden_state.modeling_hsdraft",
    "language_model.lm_drafter", "language_model.gemma4_assistant", "mtp.drafter", "mtp.nextn", "ngrams.cacheback",
)  # fmt: skip


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


# Fields on sizes and inputs of a drafter, in whichever table of config.json they are.
_TOLD = (
    "name_or_path", "model_type", "hidden_size", "target_hidden_size", "num_hidden_layers", "num_target_layers",
    "vocab_size", "draft_vocab_size", "block_size", "markov_rank", "selector_rank", "mask_token_id",
)  # fmt: skip
_TOLD_ENDS = ("layer_ids", "algorithm")


def fields_told(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the fields of a config.json that describe a drafter, as written there."""
    found: dict[str, str] = {}

    def look(table: Mapping[str, Any], place: str) -> None:
        for name, value in table.items():
            if isinstance(value, Mapping):
                look(value, f"{place}{name}.")
            elif value is not None and (name in _TOLD or name.endswith(_TOLD_ENDS)):
                found[printable(place + name)] = printable(value)

    look(checkpoint.config, "")
    return found


AT_ONCE, IN_TURN = "all depths in one forward", "one depth after the other"  # how drafts are made, for `describe`


@dataclass(frozen=True)
class Format:
    """A drafter format."""

    name: str  # shown in messages
    rank: int  # order of matching
    matches: Callable[[Checkpoint], bool]  # whether a checkpoint has this format, by its configuration and tensor names
    load: Callable[..., Any]  # builds the drafter; takes the keyword arguments of `from_pretrained`
    # Lines by title that `hsdraft info` shows, without loading weights: `drafts` is how, `cannot be loaded` why not
    describe: Callable[[Checkpoint], Mapping[str, str]] = fields_told
    drafter: Any = None  # class of the drafters; None if unknown before loading
    # Quick check of a config.json before looking at the weights
    possible: Callable[[Mapping[str, Any]], bool] = lambda config: True
    # Whether `hsdraft hub list` shows a checkpoint of this format
    listed: Callable[[Checkpoint], bool] = lambda checkpoint: True
    loads: bool = True  # False if `load` only raises an explanation
    # How well a checkpoint fits a target, as `target_info.fit_of`, without loading weights; takes the targets that the
    # files beside it name too
    fit: Callable[[Checkpoint, TargetInfo, Collection[str]], Fit | None] = lambda checkpoint, target, named: None


def told_of(form: Format, checkpoint: Checkpoint) -> dict[str, str]:
    """Returns `describe`, with what is to be said of a format that does not load."""
    if form.loads:
        return dict(form.describe(checkpoint))
    try:
        form.load(checkpoint)
    except ValueError as error:
        return {**form.describe(checkpoint), "cannot be loaded": printable(error, 400)}
    raise AssertionError(f"{form.name} is registered as one that does not load")


def with_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a `Format.possible` that checks for these fields."""
    return lambda config: all(config.get(name) is not None for name in names)


_formats: Registry[Format] = Registry("format")


def register_format(form: Format) -> None:
    """Registers a format with `AutoDrafter`; replaces a format of the same name."""
    _formats[form.name] = form


def formats() -> list[Format]:
    """Returns all formats in matching order, after loading the methods that define some."""
    load_families()
    return sorted(_formats.values(), key=lambda form: (form.rank, form.name))


def recognise(checkpoint: Checkpoint) -> Format:
    """Returns the format of a checkpoint; raises a ValueError that says what was found if none matches."""
    config = checkpoint.config
    candidates = [form for form in formats() if form.possible(config)]
    for form in candidates:
        if form.matches(checkpoint):
            return form
    marks = ("speculators_model_type", "architectures", "model_type")
    seen = ", ".join(f"{name}={printable(config[name])}" for name in marks if config.get(name) is not None)
    tensors = f"; tensors: {few(sorted(checkpoint.shapes), 8) or 'none'}" if candidates else ""
    if candidates and (told := checkpoint.quantisation_unread):
        tensors += f"; it is {told}"
    known = ", ".join(form.name for form in formats() if form.loads)
    raise ValueError(
        f"{printable(checkpoint.name)} is no drafter of a known format ({seen or 'no field names one'}{tensors}): "
        f"expected one of {known}. Convert it to one of these, or use another drafter"
    )
