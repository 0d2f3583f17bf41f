"""Loads a drafter of whatever family its config.json names, among those that have registered."""

from __future__ import annotations

import inspect
import os
from typing import Any

from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import CONFIG, HUB_ARGUMENTS, find_folder, read_json
from ...hub.fetching import loading
from ...hub.pretrained_drafter import PretrainedDrafter
from .draft_options import is_misspelt, nearest_option, option_names
from .formats import Format, recognise
from .loading_arguments import Placement, give_options, refuse_unknown
from .registry import FAMILIES, Family


def load_by_config(name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Loads a drafter of whatever family; see `AutoDrafter.from_pretrained`.

    Args:
        name: folder or Hub name.
        args, kwargs: as `from_pretrained` of the family takes them.

    Raises:
        OSError: there is no such folder or repository.
        ValueError: it holds no drafter of a family or format that is known, or a damaged one.
    """
    hub = {argument: kwargs[argument] for argument in HUB_ARGUMENTS if kwargs.get(argument) is not None}
    subfolder = kwargs.get("subfolder") or ""
    with loading(name, offline=bool(hub.get("local_files_only"))):
        config = read_json(find_folder(name, (CONFIG,), subfolder, **hub) / CONFIG)
        model_type = config.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            checkpoint = Checkpoint.open(name, subfolder, **hub)
            of_hub = {*HUB_ARGUMENTS, "subfolder"}
            others = {argument: value for argument, value in kwargs.items() if argument not in of_hub}
            return _format_of(checkpoint).load(checkpoint, **others)
    if not issubclass(family.drafter, PretrainedDrafter):
        return family.drafter.from_pretrained(name, *args, **kwargs)
    return _load_of_transformers(family, name, args, kwargs)


def _load_of_transformers(family: Family, name: str | os.PathLike[str], args: Any, kwargs: dict[str, Any]) -> Any:
    """Loads a drafter that is a model of transformers, which knows no drafting options by name, and other attention."""
    kind, placement = family.drafter, Placement.taken_from(kwargs)
    fields = inspect.signature(family.config.__init__).parameters.keys()
    options = {option: kwargs.pop(option) for option in (option_names() - fields) & kwargs.keys()}
    for argument in kwargs.keys() - fields:
        near = nearest_option(argument, option_names())
        if is_misspelt(argument, near):
            refuse_unknown(kind.__name__, [argument], option_names())
    dtype = {} if placement.dtype is None else {"dtype": placement.dtype}
    loaded = kind.from_pretrained(name, *args, **dtype, **kwargs)
    drafter = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
    give_options(drafter, {}, options)
    placement.place(drafter)
    return loaded


def _format_of(checkpoint: Checkpoint) -> Format:
    """Returns the format of a checkpoint that is of no family by its `model_type`."""
    try:
        return recognise(checkpoint)
    except ValueError as error:
        if "auto_map" not in checkpoint.config:
            raise
        advice = "import the module that registers its family, or use AutoModel and trust_remote_code=True"
        raise ValueError(f"{error}; {advice}") from None
