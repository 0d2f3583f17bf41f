"""Formats of published drafters that other projects write, and how each is recognised.

A family registers the formats that it loads. `AutoDrafter` asks them in ascending order of their rank, so that a format
with marks of its own is asked before one that is recognised by less.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.checks import few, printable
from ...core.methods import Registry
from ...hub.checkpoint import Checkpoint

# Fields that tell how large a drafter and its target are and what it reads, whatever table of config.json they are in.
_TOLD = (
    "name_or_path", "model_type", "hidden_size", "target_hidden_size", "num_hidden_layers", "num_target_layers",
    "vocab_size", "draft_vocab_size", "block_size", "markov_rank", "selector_rank", "mask_token_id",
)  # fmt: skip
_TOLD_ENDS = ("layer_ids", "algorithm")


def fields_told(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the fields of a config.json that say what a drafter is, as they are written there."""
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
    """A format of drafters.

    Attributes:
        name: what it is called, as in messages.
        rank: order of asking.
        matches: whether a checkpoint is of this format, by its configuration and by the names of its tensors.
        load: makes a drafter of a checkpoint; keyword arguments are those of `from_pretrained`.
        describe: what `hsdraft info` tells of a checkpoint, as titles and lines; nothing is loaded for it.
        drafter: class of the drafters; `None` if that is not known before loading.
        possible: whether a config.json may be one of this format, so that it is worth looking at the weights.
        listed: whether `hsdraft list` names a checkpoint of this format.
        loads: whether `load` makes a drafter; `False` if it only says why there can be none.
    """

    name: str
    rank: int
    matches: Callable[[Checkpoint], bool]
    load: Callable[..., Any]
    describe: Callable[[Checkpoint], Mapping[str, str]] = fields_told
    drafter: Any = None
    possible: Callable[[Mapping[str, Any]], bool] = lambda config: True
    listed: Callable[[Checkpoint], bool] = lambda checkpoint: True
    loads: bool = True


def with_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns whether a config.json has some fields, as `Format.possible`."""
    return lambda config: all(config.get(name) is not None for name in names)


_formats: Registry[Format] = Registry("format")


def register_format(form: Format) -> None:
    """Makes `AutoDrafter` load a format. A format of the same name is replaced."""
    _formats[form.name] = form


def formats() -> list[Format]:
    """Returns all formats, in the order of asking; methods that offer some are loaded."""
    importlib.import_module(".families", __package__)  # they register their formats, and import this module
    return sorted(_formats.values(), key=lambda form: (form.rank, form.name))


def recognise(checkpoint: Checkpoint) -> Format:
    """Returns the format of a checkpoint.

    Raises:
        ValueError: it is of none; the message names what was found.
    """
    config = checkpoint.config
    candidates = [form for form in formats() if form.possible(config)]
    for form in candidates:
        if form.matches(checkpoint):
            return form
    marks = ("speculators_model_type", "architectures", "model_type")
    seen = ", ".join(f"{name}={printable(config[name])}" for name in marks if config.get(name) is not None)
    tensors = f"; tensors: {few(sorted(checkpoint.shapes), 8) or 'none'}" if candidates else ""
    known = ", ".join(form.name for form in formats() if form.loads)
    raise ValueError(
        f"{printable(checkpoint.name)} is no drafter of a known format ({seen or 'no field names one'}{tensors}): "
        f"expected one of {known}. Convert it to one of these, or use another drafter"
    )
