"""Formats of drafters that other projects publish.

Methods register the formats that they load. `AutoDrafter` tries formats in ascending `rank`, so those with distinctive
marks come before generic ones. Formats say how well a checkpoint fits a target, whose weights need not be there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ...core.checks import few, printable
from ...core.kept import kept_with
from ...core.methods import Registry
from ...drafters.base.registry import Fit, TargetInfo
from .checkpoint import AnyCheckpoint

AT_ONCE, IN_TURN = "all depths in one forward", "one depth after the other"

# Fields on sizes and inputs of a drafter, in whichever table of config.json they are.
_TOLD = (
    "name_or_path", "model_type", "hidden_size", "target_hidden_size", "num_hidden_layers", "num_target_layers",
    "vocab_size", "draft_vocab_size", "block_size", "markov_rank", "selector_rank", "mask_token_id",
)  # fmt: skip
_TOLD_ENDS = ("layer_ids", "algorithm")


def fields_told(checkpoint: AnyCheckpoint) -> dict[str, str]:
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


@dataclass(frozen=True)
class Format:
    """A drafter format."""

    name: str  # shown in messages
    rank: int  # order of matching
    # Whether a checkpoint has this format, by its configuration and tensor names
    matches: Callable[[AnyCheckpoint], bool]
    load: Callable[..., Any]  # builds the drafter; takes the keyword arguments of `from_pretrained`
    # Lines by title that `hsdraft info` shows, without loading weights: `drafts` is how, `cannot be loaded` why not
    describe: Callable[[AnyCheckpoint], Mapping[str, str]] = fields_told
    drafter: Any = None  # class of the drafters; None if unknown before loading
    # Quick check of a config.json before looking at the weights
    possible: Callable[[Mapping[str, Any]], bool] = lambda config: True
    # Whether `hsdraft hub list` shows a checkpoint of this format
    listed: Callable[[AnyCheckpoint], bool] = lambda checkpoint: True
    loads: bool = True  # False if `load` only raises an explanation
    # How well a checkpoint fits a target, as `fit_of`, without loading weights; takes the targets that the
    # files beside it name too
    fit: Callable[[AnyCheckpoint, TargetInfo, Collection[str]], Fit | None] = lambda checkpoint, target, named: None

    def section(self, checkpoint: AnyCheckpoint) -> dict[str, dict[str, str]]:
        """Returns what `hsdraft info` shows of a checkpoint."""
        parameters = sum(math.prod(shape) for shape in checkpoint.shapes.values())
        told, quantised = dict(self.describe(checkpoint)), checkpoint.quantisation
        size = f"{parameters / 1e6:.1f}M numbers, {checkpoint.bytes / 1e6:.1f} MB"
        return {
            "drafter": {
                "name": checkpoint.name,
                "family": self.name if self.drafter is None else self.drafter.__name__,
                "format": self.name,
                "weights": f"{size}, quantised: {quantised}" if quantised else size,
                "drafts here": "no" if "cannot be loaded" in told else "yes",
                **told,
            }
        }


_formats: Registry[Format] = Registry("format")


def register_format(form: Format) -> None:
    """Registers a format with `AutoDrafter`; replaces a format of the same name."""
    _formats[form.name] = form


def formats() -> list[Format]:
    """Returns all formats in matching order, after loading the methods that define some."""
    return sorted(_formats.values(), key=lambda form: (form.rank, form.name))


def recognise(checkpoint: AnyCheckpoint) -> Format:
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


def empty_model(config: Any) -> Any:
    """Builds a language model, with or without images, on the meta device; None if transformers cannot."""
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        # Configurations of other models, of code elsewhere, or incomplete ones
        with contextlib.suppress(Exception), torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False)
    return None


def size_of(target: TargetInfo) -> int | None:
    """Returns a target's number of parameters; None if transformers has no language model of its configuration."""

    def size() -> int | None:
        model = target.model if target.model is not None else empty_model(target.config)
        return None if model is None else sum(parameter.numel() for parameter in model.parameters())

    return kept_with(target, "size", size)
