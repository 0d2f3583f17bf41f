"""Loading a drafter of any family."""

from __future__ import annotations

import os
from typing import Any

from ..repository.care import care
from ..repository.checkpoint import Checkpoint
from ..repository.drafter_files import CONFIG, HUB_ARGUMENTS, find_folder, read_json
from . import families  # noqa: F401  # they register themselves
from .formats import Format, recognise
from .registry import FAMILIES


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
            args, kwargs: as the family's own `from_pretrained` takes them.

        Raises:
            OSError: there is no such folder or repository, or it holds no configuration.
            ValueError: it is of no family and of no format that is known, or its files contradict each other.
        """
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        name, subfolder = pretrained_model_name_or_path, kwargs.get("subfolder") or ""
        with care().loading(name, offline=bool(hub.get("local_files_only"))):
            config = read_json(find_folder(name, (CONFIG,), subfolder, **hub) / CONFIG)
            model_type = config.get("model_type")
            family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
            if family is None:
                checkpoint = Checkpoint.open(name, subfolder, **hub)
                of_hub = {*HUB_ARGUMENTS, "subfolder"}
                others = {argument: value for argument, value in kwargs.items() if argument not in of_hub}
                return _format_of(checkpoint).load(checkpoint, **others)
        return family.drafter.from_pretrained(name, *args, **kwargs)


def _format_of(checkpoint: Checkpoint) -> Format:
    """Returns the format of a checkpoint that is of no family by its `model_type`."""
    try:
        return recognise(checkpoint)
    except ValueError as error:
        if "auto_map" not in checkpoint.config:
            raise
        advice = "import the module that registers its family, or use AutoModel and trust_remote_code=True"
        raise ValueError(f"{error}; {advice}") from None
