"""Loading a drafter of any family: of the one that its config.json names, or whose format it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import CONFIG, HUB_ARGUMENTS, find_folder, read_json
from ...hub.fetching import loading
from ...hub.pretrained_drafter import PretrainedDrafter, fields_of
from .draft_options import is_misspelt, nearest_option, option_names
from .formats import Format, recognise
from .loading_arguments import Placement, give_options, refuse_unknown
from .registry import FAMILIES, Family


class AutoDrafter:
    """Loads drafters; which family one belongs to is read from its config.json, and for other formats from its tensors.

    Drafters that other projects publish are loaded as they are, without conversion and without code of theirs.

    drafter = AutoDrafter.from_pretrained("user/SmolLM2-135M-Instruct-hsdraft")
    """

    def __init__(self) -> None:
        raise TypeError("AutoDrafter is not made by itself: call AutoDrafter.from_pretrained(name)")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter.

        Args:
            pretrained_model_name_or_path: folder or Hub name of a drafter.
            args, kwargs: these are the same for all families:
                - `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`, `force_download`: for the Hub;
                - `dtype` (or `torch_dtype`): of the weights, that of the files by default;
                - `device_map`: one device for the weights, or "auto", as a drafter follows its target anyway;
                - `attn_implementation`: of a language model. All others compute attention by themselves, and take
                  "sdpa" and "eager", which change nothing there;
                - drafting options by name.
                Beyond them a language model takes what `AutoModelForCausalLM.from_pretrained` takes, a drafter that
                `hsdraft train` made fields of its configuration, and a P-EAGLE drafter `mask_token_id`, where its files
                do not name it.

        Raises:
            OSError: there is no such folder or repository, or it holds no configuration.
            TypeError: an argument is unknown. The message names it.
            ValueError: it is of no family and of no format that is known, or its files contradict each other.
        """
        return _loaded(pretrained_model_name_or_path, args, kwargs)


def _loaded(name: str | os.PathLike[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from . import families  # noqa: F401  # which register themselves

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


def _load_of_transformers(
    family: Family, name: str | os.PathLike[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Loads a drafter that is a model of transformers, which knows no drafting options by name, and other attention."""
    kind, placement = family.drafter, Placement.taken_from(kwargs)
    fields = fields_of(family.config)
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
